"""Two GPUs that exchange data through each other's memory: what needs the scope of the system."""

import pytest
import torch

from dsv4.simulator import Deadlock, Report, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

# Each GPU stores a word in the other's `inbox` and sets the other's flag; then it waits for its own
# flag and copies its inbox to `out`. One thread per GPU does so.
EXCHANGE = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry exchange(
    .param .b64 inbox, .param .b64 flag, .param .b64 out,
    .param .b64 inbox_of_peer, .param .b64 flag_of_peer, .param .b32 word)
{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<8>;
ld.param.b64 %d1, [inbox];
ld.param.b64 %d2, [flag];
ld.param.b64 %d3, [out];
ld.param.b64 %d4, [inbox_of_peer];
ld.param.b64 %d5, [flag_of_peer];
ld.param.b32 %r1, [word];
mov.u32 %r2, %tid.x;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra DONE;
st.global.b32 [%d4], %r1;
SEND
WAIT:
RECEIVE
setp.eq.u32 %p2, %r3, 0;
@%p2 bra WAIT;
AFTER
ld.global.b32 %r4, [%d1];
st.global.b32 [%d3], %r4;
DONE:
ret;
}
"""
SEND, RECEIVE = "st.release.sys.global.b32 [%d5], 1;", "ld.acquire.sys.global.b32 %r3, [%d2];"


def exchange(send: str, receive: str, after: str = "", schedule: str = "eager") -> Report:
    text = EXCHANGE.replace("SEND", send).replace("RECEIVE", receive).replace("AFTER", after)
    inbox, flag, out = (torch.zeros(2, 64, dtype=torch.int32) for _ in range(3))

    def params(gpu: int) -> tuple:
        mine = (inbox[gpu], flag[gpu], out[gpu])
        return (*mine, inbox[1 - gpu], flag[1 - gpu], 100 + gpu)

    report = simulate_ptx(
        text, "exchange", grid=1, block=32, params=params(0), peers=(params(1),), schedule=schedule
    )
    assert out[:, 0].tolist() == [101, 100]
    return report


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_an_exchange_of_the_systems_scope_is_clean(schedule):
    report = exchange(SEND, RECEIVE, schedule=schedule)
    report.raise_if_racy()
    assert report.launches[0].coverage.complete


def test_fences_of_the_systems_scope_order_relaxed_flags():
    send = "fence.acq_rel.sys;\nst.relaxed.sys.global.b32 [%d5], 1;"
    receive = "ld.relaxed.sys.global.b32 %r3, [%d2];"
    exchange(send, receive, "fence.acq_rel.sys;").raise_if_racy()


RACE = "read-write race"


@pytest.mark.parametrize(
    ("send", "receive", "after"),
    [
        (SEND.replace("sys", "gpu"), RECEIVE, ""),
        (SEND, RECEIVE.replace("sys", "gpu"), ""),
        (SEND.replace("release", "relaxed"), RECEIVE, ""),
        (SEND, RECEIVE.replace("acquire", "relaxed"), ""),
        ("fence.acq_rel.gpu;\nst.relaxed.sys.global.b32 [%d5], 1;", RECEIVE, ""),
        (SEND, RECEIVE.replace("acquire", "relaxed"), "fence.acq_rel.gpu;"),
        ("st.volatile.global.b32 [%d5], 1;", RECEIVE, ""),
    ],
)
def test_less_than_the_systems_scope_is_a_race(send, receive, after):
    report = exchange(send, receive, after)
    assert RACE in {found.kind for found in report.races}


def test_atomics_of_gpus_need_each_others_scope():
    report = exchange("red.release.gpu.global.add.u32 [%d5], 1;", RECEIVE)
    assert "scope too narrow" in {found.kind for found in report.races}
    exchange("red.release.sys.global.add.u32 [%d5], 1;", RECEIVE).raise_if_racy()


def test_a_flag_that_nobody_sets_is_a_deadlock():
    with pytest.raises(Deadlock):
        exchange("", RECEIVE)


def test_a_gpu_alone_needs_no_more_than_its_own_scope():
    """The same text with two CTAs of one GPU: the scope of the GPU is enough."""
    body = EXCHANGE.replace("SEND", SEND.replace("sys", "gpu"))
    body = body.replace("RECEIVE", RECEIVE.replace("sys", "gpu")).replace("AFTER", "")
    inbox, flag, out = (torch.zeros(64, dtype=torch.int32) for _ in range(3))
    params = (inbox, flag, out, inbox, flag, 7)
    simulate_ptx(body, "exchange", grid=1, block=32, params=params).raise_if_racy()
    assert out[0] == 7
