"""Kernels that never end: loops without progress, and what a deadlock says first."""

import re

import pytest

from dsv4.simulator import Deadlock, Endless, KernelFault
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
        run_body(body, schedule=schedule, instructions_per_warp=1_000)
    text = str(caught.value)
    assert re.search(r"warp \d ran [\d,]+ instructions, the limit is 1,000", text)
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


# Warpgroups 0 and 1 ask for registers that warpgroup 2 gives up, after it has waited for nobody.
_REGISTERS = """
setp.lt.u32 %p4, %r1, 256;
@%p4 bra MORE;
setmaxnreg.dec.sync.aligned.u32 {less};
bra JOIN;
MORE: setmaxnreg.inc.sync.aligned.u32 {more};
JOIN: bar.sync 0;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_registers_that_nobody_gives_up_come_first(schedule):
    """384 threads start with 168 registers: 504 for the three warps of a quarter, though 512 would
    fit the register file."""
    run_body(_REGISTERS.format(less=56, more=224), threads=384, schedule=schedule)
    lines = _deadlock(_REGISTERS.format(less=64, more=224), schedule, threads=384)
    root, where = lines[1:3]
    assert re.search(r"root cause: .* warp \d waits for setmaxnreg\.inc to 224 registers", root)
    assert "it has 168, and the CTA's pool 48 more for it" in root
    assert "a CTA of 384 threads starts with at most 168 each" in root
    assert re.search(r"others that share them keep .*\b64 \(warp \d+\)", root)
    assert "setmaxnreg.inc.sync.aligned.u32 224" in where
    assert any("barrier 0" in line for line in lines[3:])


def test_registers_that_a_waiting_warp_would_give_up_are_not_the_cause():
    """The warpgroup that has registers to spare waits at an mbarrier itself."""
    wait = """
    W: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;
    @!%p6 bra W;
    setmaxnreg.dec"""
    body = INIT_BARRIER + _REGISTERS.format(less=56, more=224)
    lines = _deadlock(body.replace("setmaxnreg.dec", wait), "eager", threads=384)
    assert re.search(r"warp (8|9|10|11) waits for mbarrier", lines[1])
    assert any("waits for setmaxnreg.inc" in line for line in lines[3:])


@pytest.mark.parametrize(
    "directives, most", [("", 168), (".maxnreg 128", 128), (".minnctapersm 2", 80)]
)
def test_registers_at_launch_are_what_the_directives_leave(directives, most):
    grow = "setmaxnreg.inc.sync.aligned.u32 {0};"
    run_body(grow.format(most), threads=384, directives=directives)
    (cause,) = (
        line
        for line in _deadlock(grow.format(most + 8), "eager", threads=384, directives=directives)
        if "root cause" in line
    )
    assert f"it has {most}, and the CTA's pool 0 more" in cause


def test_registers_are_asked_for_in_eights_and_by_whole_warpgroups():
    with pytest.raises(KernelFault, match=r"setmaxnreg 20: a multiple of 8 in 24\.\.256"):
        run_body("setmaxnreg.dec.sync.aligned.u32 20;")
    roles = "@%p1 setmaxnreg.dec.sync.aligned.u32 24;\n@!%p1 setmaxnreg.dec.sync.aligned.u32 {0};"
    run_body(roles.format(24), threads=128)
    kind = "setmaxnreg of part of a warpgroup"
    for body, counts in (
        (roles.format(32), "24 registers and 32 registers"),
        ("@%p1 setmaxnreg.dec.sync.aligned.u32 24;", "24 registers and none"),
    ):
        # Of every other warp, and not of every CTA.
        (found,) = run_body(body, threads=128, grid=2).races
        assert found.kind == kind and counts in found.message
        assert "warps 0 and 1 are of one warpgroup" in found.message
