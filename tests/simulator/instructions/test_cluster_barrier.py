"""barrier.cluster counts threads: those of a warp may arrive and wait apart from each other."""

import pytest
import torch

from dsv4.simulator import Deadlock, KernelFault
from tests.simulator.helpers.ptx import run_body

pytestmark = pytest.mark.stage("simulator")

# The lower half of every warp takes one branch, the upper half the other.
_HALVES = """
setp.lt.u32 %p6, %r6, 16;
@%p6 bra LOWER;
{upper}
bra.uni JOIN;
LOWER:
{lower}
JOIN:
"""
_SYNC = "barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;"
# Every thread stores into the other CTA's memory, and reads what that stored into its own.
_EXCHANGE = """
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
xor.b32 %r8, %r7, 1;
mapa.shared::cluster.u32 %r9, %r4, %r8;
st.shared::cluster.b32 [%r9], %r1;
{sync}
ld.shared.b32 %r10, [%r4];
{sync}
setp.eq.u32 %p7, %r7, 0;
@%p7 st.global.b32 [%d2], %r10;
"""


def _run(body: str, **options):
    out = torch.zeros(64, dtype=torch.int32)
    return out, run_body(body, out=out, grid=2, cluster=2, **options)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_halves_of_a_warp_arrive_apart(schedule, seed):
    sync = [
        _HALVES.format(upper=_SYNC, lower=_SYNC)
        .replace("LOWER", f"LOWER{k}")
        .replace("JOIN", f"J{k}")
        for k in range(2)
    ]
    first, _, last = _EXCHANGE.partition("{sync}")
    out, report = _run(
        first + sync[0] + last.replace("{sync}", sync[1]), schedule=schedule, seed=seed
    )
    assert out.tolist() == list(range(64))
    assert not report.races


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_one_lane_does_not_arrive_for_its_warp(schedule):
    body = f"setp.eq.u32 %p6, %r6, 0;\n@!%p6 bra DONE;\n{_SYNC}\nDONE:\nbar.warp.sync -1;"
    with pytest.raises(Deadlock, match=r"cluster barrier \(4 of 128 threads arrived\)"):
        _run(body, schedule=schedule)


def test_a_guard_that_is_false_does_not_arrive():
    arrive = "@%p1 barrier.cluster.arrive.aligned;\n@!%p1 bra DONE;"
    with pytest.raises(Deadlock, match=r"cluster barrier \(64 of 128 threads arrived\)"):
        _run(f"{arrive}\nbarrier.cluster.wait.aligned;\nDONE:\nbar.sync 0;")


@pytest.mark.parametrize(
    "instruction",
    [
        "barrier.cluster.arrive.aligned",
        "barrier.cluster.wait.aligned",
        "bar.sync 0",
        "bar.arrive 1, 64",
    ],
)
def test_aligned_barriers_need_the_whole_warp(instruction):
    before = "barrier.cluster.arrive;" if "wait" in instruction else ""
    body = before + _HALVES.format(upper=f"{instruction};", lower="mov.u32 %r8, 1;")
    with pytest.raises(KernelFault, match=r"in a part of a warp: all its threads must take it"):
        _run(body)


def test_threads_that_exited_are_not_waited_for():
    body = f"setp.lt.u32 %p6, %r6, 16;\n@%p6 exit;\n{_SYNC}\nst.global.b32 [%d2], 1;"
    out, _ = _run(body, races=False)
    assert out.reshape(2, 2, 16).tolist() == [[[0] * 16, [1] * 16]] * 2


def test_what_a_lane_does_after_its_arrival_is_not_released():
    store = "st.shared::cluster.b32 [%r9], %r1;\n"
    arrive, _, wait = _SYNC.partition("\n")
    sync = _HALVES.format(upper=f"{arrive}\n{store}{wait}", lower=store + _SYNC)
    body = _EXCHANGE.replace(store, "")
    first, _, last = body.partition("{sync}")
    _, report = _run(first + sync + last.replace("{sync}", _SYNC))
    assert "read-write race" in {finding.kind for finding in report.races}
