"""Kernels that never end: loops without progress, and what a deadlock says first."""

import re

import pytest

from dsv4.simulator import Deadlock, Endless
from tests.simulator.helpers.ptx import INIT_BARRIER, run_body

pytestmark = pytest.mark.stage("simulator")

SCHEDULES = ("eager", "lazy", "random")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "body",
    ["L: bra L;", "L: ld.global.b32 %r8, [%d1];\nsetp.eq.u32 %p4, %r8, 0;\n@%p4 bra L;"],
    ids=["empty loop", "poll by an ordinary load"],
)
def test_a_loop_without_end(body, schedule):
    with pytest.raises(Endless) as caught:
        run_body(body, schedule=schedule, instructions_per_warp=20_000)
    text = str(caught.value)
    assert re.search(r"warp \d ran [\d,]+ instructions, the limit is 20,000", text)
    hottest = text.partition("hottest block")[2]
    assert body.partition(";")[0].removeprefix("L: ") in hottest


def test_the_limit_is_for_each_launch():
    for _ in range(3):
        run_body("mov.u32 %r8, 0;", instructions_per_warp=100)


def _deadlock(body: str, schedule: str, **options) -> list[str]:
    with pytest.raises(Deadlock) as caught:
        run_body(body, schedule=schedule, **options)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_that_no_copy_brings_come_first(schedule):
    """Warp 1 waits for twice the bytes that are copied; warp 0 for warp 1, at a barrier."""
    body = f"""
    {INIT_BARRIER}
    setp.eq.u32 %p4, %r1, 32;
    @%p1 bra JOIN;
    @!%p4 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, [%r30];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;
    @!%p6 bra WAIT;
    JOIN:
    bar.sync 1;
    """
    lines = _deadlock(body, schedule)
    assert "root cause: CTA (0, 0, 0) warp 1 waits for mbarrier" in lines[1]
    assert "256 bytes pending" in lines[1]
    assert "no copy under way brings the bytes" in lines[1]
    assert "mbarrier.try_wait" in lines[2]
    assert any("warp 0 waits for barrier 1 (32 of 64" in line for line in lines[3:])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_that_have_exited_come_first(schedule):
    body = f"""
    {INIT_BARRIER}
    setp.eq.u32 %p4, %r5, 2;
    @%p4 bra DONE;
    @%p1 bra WAIT;
    bar.sync 2, 64;
    mbarrier.arrive.shared.b64 %d5, [%r30];
    bra DONE;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;
    @!%p6 bra WAIT;
    bar.sync 2, 64;
    DONE:
    """
    # Warp 2, whom warp 1 meant to meet, has gone; 96 threads, of which 64 are left.
    body = body.replace("bar.sync 2, 64;\n    mbarrier", "bar.sync 2, 96;\n    mbarrier")
    lines = _deadlock(body, schedule, threads=96)
    assert "warp 1 waits for barrier 2 (32 of 96 threads arrived)" in lines[1]
    assert "only 64 threads of the CTA have not exited" in lines[1]


def test_a_poll_does_not_show_what_was_waited_for_before():
    body = """
    bar.sync 0;
    SPIN: ld.volatile.global.b32 %r8, [%d1];
    setp.eq.u32 %p4, %r8, 0;
    @%p4 bra SPIN;
    """
    lines = _deadlock(body, "eager")
    assert "waits for a word in memory to change" in lines[1]
    assert "ld.volatile" in lines[2]


def test_warps_that_wait_alike_share_a_line():
    body = """
    @%p1 bra DONE;
    bar.sync 1, 256;
    DONE:
    """
    lines = _deadlock(body, "eager", threads=256)
    assert len(lines) == 6
    assert "and 2 more waits for barrier 1" in lines[4]
