"""Plans of the experts' products."""

from __future__ import annotations

import pytest

from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.plan import ProductPlan, Tiling, choose, tilings

CONFIGS = {
    "Flash": ExpertsConfig(4096, 2048),
    "Pro": ExpertsConfig(7168, 3072),
    "Flash, FP8": ExpertsConfig(4096, 2048, expert_dtype="fp8"),
    "a third of Pro": ExpertsConfig(7168, 1024),
    "odd": ExpertsConfig(640, 384, scale_form="raw"),
}


def plans_of(config: ExpertsConfig, tiling: Tiling) -> list[ProductPlan]:
    products = [
        ProductPlan.gate_and_up(config, tiling, is_shared, 1) for is_shared in (True, False)
    ]
    return [*products, ProductPlan.down(config, tiling, 1)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_every_tiling_has_a_plan_within_its_budgets(config) -> None:
    for tiling in tilings(config):
        for plan in plans_of(config, tiling):
            assert plan.smem.total_bytes <= plan.capacity
            # The load warp's, an activation warp's, and those of its lanes' copies.
            assert plan.barriers.full_arrivals("ring") == (2 + 32 if plan.has_copies else 2)
            assert plan.barriers.empty_arrivals("ring") == 4 * plan.panels
            assert f"{plan.tile_rows} rows" in str(plan)
            assert plan.row_tiles * plan.tile_rows == plan.out_rows * (2 if plan.is_gated else 1)
            for kind in plan.kinds:
                assert kind.steps * kind.blocks >= plan.k_blocks > (kind.steps - 1) * kind.blocks
                assert 2 * plan.panels * kind.blocks * kind.block_bytes == plan.weight_bytes


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_products_of_a_launch_have_the_same_shared_memory_and_barriers(config) -> None:
    joint = [tiling for tiling in tilings(config) if tiling.is_joint]
    assert joint
    for tiling in joint:
        up, down = (
            ProductPlan.gate_and_up(config, tiling, False, 1),
            ProductPlan.down(config, tiling, 1),
        )
        assert up.smem == down.smem
        assert up.barriers == down.barriers
        # A warp that shows a tile, all others that read it.
        assert up.barriers.full_arrivals("board") == 1
        assert up.barriers.empty_arrivals("board") == 4 * tiling.warpgroups + 3


def test_a_ring_has_a_stage_for_every_activation_warp() -> None:
    """A warp that skips a phase of a stage could not tell its parity from the one before."""
    with pytest.raises(AssertionError, match="has 2 stages"):
        ProductPlan.down(CONFIGS["Flash"], Tiling(8, 8, 8, stages=2), 1)


def test_few_tokens_take_the_smallest_tile() -> None:
    config = CONFIGS["Flash"]
    found = [tilings(config)[choose(config, tokens)] for tokens in (1, 8, 9, 64, 256, 8192)]
    assert [tiling.tokens for tiling in found] == sorted(tiling.tokens for tiling in found)
    assert found[0].tokens == found[0].shared_tokens == 8
    # One token of Pro has more tiles than CTAs take in a turn.
    assert [choose(CONFIGS[name], 1) for name in ("Flash", "Pro")] == [0, 1]
    # A tile takes the fewest columns that hold its tokens.
    wide = ProductPlan.down(config, found[-1], 1)
    assert [kind.tokens for kind in wide.routed] == [found[-1].tokens // 2, found[-1].tokens]


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden", 200), ("inner", 64), ("top_k", 0), ("limit", 0.0), ("scale_form", "other")],
)
def test_other_configurations_are_refused_by_name(name, value) -> None:
    options = {"hidden": 512, "inner": 256} | {name: value}
    with pytest.raises(ValueError, match=name):
        ExpertsConfig(**options)
