"""Plans of CTAs around a ring of stages."""

from __future__ import annotations

import pytest

from dsv4.arch import SM_90A
from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, Warps
from dsv4.kernels.kit.ring_plan import RingPlan

pytestmark = pytest.mark.stage("E")


class Copies(RingPlan):
    """A ring of `stage` bytes beside `rest` bytes."""

    def __init__(
        self, stage: int, rest: int, ctas: int = 1, most: int | None = None, groups: int = 1
    ) -> None:
        self.sizes = stage, rest
        self.limits = ctas, most, groups

    ctas_per_sm = property(lambda self: self.limits[0])
    most_stages = property(lambda self: self.limits[1])
    stage_groups = property(lambda self: self.limits[2])

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        stage, rest = self.sizes
        buffers = Buffer("ring", "Uint8", stages * stage), Buffer("rest", "Uint8", rest)
        return (*buffers, *self._barriers(stages).split_buffers)

    def _barriers(self, stages: int) -> BarrierGraph:
        load, use = Arrival("load", Arrive.TMA), Arrival("use", Arrive.WARP)
        warps = Warps.of(load=1, use=4)
        return BarrierGraph(warps, (Edge("ring", "bytes", (load,), (use,), stages),))


def test_a_ring_takes_what_is_left() -> None:
    plan = Copies(10_000, 30_000)
    assert plan.capacity == SM_90A.smem_per_cta
    assert plan.stages == (plan.capacity - 30_000) // 10_016  # with two barriers a stage
    assert plan.barriers["ring"].stages == plan.stages
    assert plan.smem.free_bytes < 10_016


def test_ctas_of_an_sm_share_its_memory() -> None:
    one, two = Copies(10_000, 5_000), Copies(10_000, 5_000, ctas=2)
    assert 2 * two.capacity + 2 * 1024 == SM_90A.smem_per_sm
    assert (one.stages, two.stages) == (22, 11)


def test_stages_may_be_limited() -> None:
    assert Copies(10_000, 0, most=3).stages == 3
    assert Copies(10_000, 0, most=1).stages == 1


def test_groups_of_consumers_keep_their_stages() -> None:
    assert Copies(10_000, 5_000, ctas=2, groups=2).stages == 10
    assert Copies(10_000, 5_000, ctas=2, groups=3).stages == 9
    assert Copies(10_000, 5_000, most=5, groups=2).stages == 4


def test_a_stage_that_does_not_fit_is_refused() -> None:
    plan = Copies(1000, 240_000)
    assert plan.stages == 1
    with pytest.raises(AssertionError, match="a CTA has 232448"):
        _ = plan.smem
