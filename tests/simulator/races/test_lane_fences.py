"""Fences are those of the threads that execute them: flags that other lanes of the warp set or see
need bar.warp.sync, on the right side of the fence."""

import pytest

from tests.simulator.helpers.ptx import kinds

pytestmark = pytest.mark.stage("simulator")

RACE = ["read-write race"]
# Lanes 0 and 1 of CTA 0 write and set a flag, those of CTA 1 wait for it and read.
_HANDOVER = """
setp.eq.u32 %p8, %r6, 0;
setp.eq.u32 %p9, %r6, 1;
@!%p3 bra CONSUME;
{produce}
bra DONE;
CONSUME:
{consume}
DONE:
"""
_WRITE, _FENCE = "{} st.global.b32 [%d1+64], 7;", "{} fence.acq_rel.gpu;"
_FLAG, _READ = "{} st.relaxed.gpu.global.b32 [%d1], 1;", "{} ld.global.b32 %r13, [%d1+64];"
_POLL = """
mov.u32 %r12, 1;
SPIN: {} ld.relaxed.gpu.global.b32 %r12, [%d1];
setp.eq.u32 %p5, %r12, 0;
@%p5 bra SPIN;
"""
LANE_0, LANE_1, ALL, SYNC = "@%p8", "@%p9", "", "bar.warp.sync -1;"
PRODUCE = "\n".join(step.format(LANE_0) for step in (_WRITE, _FENCE, _FLAG))
CONSUME = "\n".join(step.format(LANE_0) for step in (_POLL, _FENCE, _READ))


def _handover(produce: str = PRODUCE, consume: str = CONSUME, schedule: str = "eager") -> list[str]:
    body = _HANDOVER.format(produce=produce, consume=consume)
    return kinds(body, grid=2, threads=32, schedule=schedule)


every_schedule = pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])


@every_schedule
@pytest.mark.parametrize(
    ("write", "before", "fence", "between", "flag", "clean"),
    [
        (LANE_0, "", LANE_0, "", LANE_0, True),
        (LANE_0, "", ALL, "", LANE_0, True),
        (LANE_1, SYNC, LANE_0, "", LANE_0, True),
        (LANE_1, SYNC, ALL, "", LANE_0, True),
        (LANE_1, "", LANE_0, "", LANE_0, False),
        (LANE_1, "", LANE_0, SYNC, LANE_0, False),  # the fence is too early
        (LANE_1, "", LANE_1, SYNC, LANE_0, False),  # the fence is not of the flag's thread
        (LANE_0, "", LANE_1, "", LANE_0, False),
        (LANE_0, SYNC, LANE_1, SYNC, LANE_0, False),
    ],
)
def test_what_a_fence_before_a_flag_covers(write, before, fence, between, flag, clean, schedule):
    steps = (_WRITE.format(write), before, _FENCE.format(fence), between, _FLAG.format(flag))
    assert _handover(produce="\n".join(steps), schedule=schedule) == ([] if clean else RACE)


@every_schedule
@pytest.mark.parametrize(
    ("fence", "between", "read", "clean"),
    [
        (LANE_0, "", LANE_0, True),
        (ALL, "", LANE_0, True),
        (LANE_0, SYNC, LANE_1, True),
        (ALL, SYNC, LANE_1, True),
        (LANE_0, "", LANE_1, False),
        (ALL, "", LANE_1, False),  # lane 1 has fenced, but not seen the flag
        (LANE_1, "", LANE_0, False),
        (LANE_1, SYNC, LANE_0, False),
    ],
)
def test_what_a_fence_behind_a_flag_covers(fence, between, read, clean, schedule):
    """Lane 0 waits for the flag."""
    steps = (_POLL.format(LANE_0), _FENCE.format(fence), between, _READ.format(read))
    assert _handover(consume="\n".join(steps), schedule=schedule) == ([] if clean else RACE)


def test_lanes_fence_and_flag_each_for_themselves():
    """Two lanes with a word and a flag each."""
    both = "setp.lt.u32 %p10, %r6, 2;"
    lanes = "@%p10 "
    write = f"{lanes} st.global.b32 [%d2+64], 7;"
    flag = f"{lanes} st.relaxed.gpu.global.b32 [%d2], 1;"
    poll = _POLL.format(lanes).replace("[%d1]", "[%d2]")
    for fence in (f"{lanes} fence.acq_rel.gpu;", "fence.acq_rel.gpu;"):
        consume = f"{both}\n{poll}\n{fence}\n{lanes} ld.global.b32 %r13, [%d2+64];"
        assert _handover(f"{both}\n{write}\n{fence}\n{flag}", consume) == []


@pytest.mark.parametrize(("scope", "clean"), [("cluster", True), ("cta", False)])
def test_a_relaxed_wait_sees_no_further_than_its_scope(scope, clean):
    """CTA 0 writes to shared memory of CTA 1 and arrives there; the fence behind is wide."""
    sync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
    body = f"""
    add.s32 %r30, %r2, 2048;
    @%p2 mbarrier.init.shared.b64 [%r30], 64;
    @%p2 fence.mbarrier_init.release.cluster;
    {sync}
    @!%p3 bra CONSUME;
    mapa.shared::cluster.u32 %r8, %r4, 1;
    mapa.shared::cluster.u32 %r9, %r30, 1;
    st.shared::cluster.b32 [%r8], %r1;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];
    bra DONE;
    CONSUME:
    W: mbarrier.try_wait.parity.relaxed.{scope}.shared::cta.b64 %p6, [%r30], 0, 1000;
    @!%p6 bra W;
    fence.acq_rel.cluster;
    ld.shared.b32 %r8, [%r4];
    DONE:
    {sync}
    """
    assert kinds(body, grid=2, cluster=2) == ([] if clean else RACE)
