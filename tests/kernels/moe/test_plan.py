"""Plans of the experts' products."""

from __future__ import annotations

import pytest

from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.plan import ProductPlan, choose, tilings

CONFIGS = {
    "Flash": ExpertsConfig(4096, 2048),
    "Pro": ExpertsConfig(7168, 3072),
    "Flash, FP8": ExpertsConfig(4096, 2048, expert_dtype="fp8"),
    "a third of Pro": ExpertsConfig(7168, 1024),
    "odd": ExpertsConfig(640, 384, scale_form="raw"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_every_tiling_has_a_plan_within_its_budgets(config) -> None:
    for tiling in tilings(config):
        for make in (ProductPlan.gate_and_up, ProductPlan.down):
            plan = make(config, tiling, 1)
            assert plan.smem.total_bytes <= plan.capacity
            assert plan.barriers.full_arrivals("ring") == 2
            assert plan.barriers.empty_arrivals("ring") == 8
            assert "load 8" in str(plan)
            for kind in (plan.routed, plan.shared):
                assert kind.steps * kind.blocks >= plan.k_blocks > (kind.steps - 1) * kind.blocks
                assert 2 * kind.blocks * kind.block_bytes == 16384


def test_few_tokens_take_the_smallest_tile() -> None:
    config = CONFIGS["Flash"]
    found = [tilings(config)[choose(config, tokens)] for tokens in (1, 8, 9, 64, 256, 8192)]
    assert [tiling.tokens for tiling in found] == sorted(tiling.tokens for tiling in found)
    assert found[0].tokens == found[0].shared_tokens == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden", 200), ("inner", 64), ("top_k", 0), ("limit", 0.0), ("scale_form", "other")],
)
def test_other_configurations_are_refused_by_name(name, value) -> None:
    options = {"hidden": 512, "inner": 256} | {name: value}
    with pytest.raises(ValueError, match=name):
        ExpertsConfig(**options)
