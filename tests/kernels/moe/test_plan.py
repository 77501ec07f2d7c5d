"""Plans of the experts' products."""

from __future__ import annotations

import pytest

from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.plan import ProductPlan, Tiling, choose, tilings
from dsv4.kernels.moe.wide_plan import COLUMNS, WidePlan, scale_columns

CONFIGS = {
    "Flash": ExpertsConfig(4096, 2048),
    "Pro": ExpertsConfig(7168, 3072),
    "Flash, FP8": ExpertsConfig(4096, 2048, expert_dtype="fp8"),
    "a third of Pro": ExpertsConfig(7168, 1024),
    "odd": ExpertsConfig(640, 384, scale_form="raw"),
}


def plans_of(config: ExpertsConfig, tiling: Tiling) -> list[ProductPlan]:
    if tiling.is_wide:
        return [WidePlan.up(config, tiling, 1), WidePlan.down(config, tiling, 1)]
    products = [
        ProductPlan.gate_and_up(config, tiling, is_shared, 1) for is_shared in (True, False)
    ]
    return [*products, ProductPlan.down(config, tiling, 1)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_every_tiling_has_a_plan_within_its_budgets(config) -> None:
    for tiling in tilings(config):
        for plan in plans_of(config, tiling):
            assert plan.smem.total_bytes <= plan.capacity
            consumers = 4 * plan.panels
            if tiling.is_wide:
                assert plan.barriers.full_arrivals("ring") == 1
                assert plan.barriers.empty_arrivals("ring") == consumers * plan.sharing
            else:
                # The load warp's, an activation warp's, and those of its lanes' copies.
                copies = 32 if plan.has_copies else 0
                assert plan.barriers.full_arrivals("ring") == 2 + copies
                assert plan.barriers.empty_arrivals("ring") == consumers
            assert f"{plan.tile_rows} rows" in str(plan)
            assert plan.row_tiles * plan.tile_rows == plan.out_rows * (2 if plan.is_gated else 1)
            for kind in plan.kinds:
                assert kind.steps * kind.blocks >= plan.k_blocks > (kind.steps - 1) * kind.blocks
                weights = 2 * plan.panels * kind.blocks * kind.block_bytes
                # A stage of many tokens is one k block, of FP8 or half as many bytes of FP4.
                assert weights == plan.weight_bytes or tiling.is_wide


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


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_tiles_with_whole_groups_of_h_leave_codes(config) -> None:
    """Of routed rows: 64 rows of each of four warpgroups are 128 channels of gate and of up."""
    for tiling in (tiling for tiling in tilings(config) if not tiling.is_wide):
        shared, routed, down = plans_of(config, tiling)
        assert routed.rounds == tiling.rounds
        assert tiling.warpgroups == 4 or not tiling.rounds
        assert not shared.rounds and not down.rounds
        assert down.quantizes != routed.rounds
        # A magnitude of each column from each of 16 warps.
        assert routed.largest == down.largest == (16 * tiling.tokens if routed.rounds else 0)


def test_a_ring_has_a_stage_for_every_activation_warp() -> None:
    """A warp that skips a phase of a stage could not tell its parity from the one before."""
    with pytest.raises(AssertionError, match="has 2 stages"):
        ProductPlan.down(CONFIGS["Flash"], Tiling(8, 8, 8, stages=2), 1)


def test_few_tokens_take_the_smallest_tile() -> None:
    config = CONFIGS["Flash"]
    counts = (1, 8, 9, 64, 256, 512, 2048, 8192)
    found = [tilings(config)[choose(config, tokens, 256)] for tokens in counts]
    assert [tiling.tokens for tiling in found] == sorted(tiling.tokens for tiling in found)
    assert found[0].tokens == found[0].shared_tokens == 8
    # One token of Pro has more tiles than CTAs take in a turn.
    assert [choose(CONFIGS[name], 1, 256) for name in ("Flash", "Pro")] == [0, 1]
    # A tile takes the fewest columns that hold its tokens.
    wanted = (8, 16), *COLUMNS.values()
    for tiling, columns in zip(found[-4:], wanted, strict=True):
        assert tuple(kind.tokens for kind in plans_of(config, tiling)[-1].routed) == columns


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_fewer_experts_have_the_tiles_of_more_tokens(config) -> None:
    for tokens in (129, 512, 2048, 8192):
        found = [choose(config, tokens, experts) for experts in (384, 256, 64, 8)]
        assert found == sorted(found)
        assert found[-1] == len(tilings(config)) - 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_tiles_of_many_tokens_are_those_of_tma_and_tensor_cores(config) -> None:
    wide = [tiling for tiling in tilings(config) if tiling.is_wide]
    for plan in (plan for tiling in wide for plan in plans_of(config, tiling)):
        assert plan.row_groups * plan.sharing == plan.row_tiles
        for kind in plan.kinds:
            # Swizzled tiles begin at multiples of eight rows, those of a CTA's part, too.
            assert kind.tokens % (8 * plan.sharing) == 0
            assert kind.tokens <= plan.x_rows


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 28_672])
def test_columns_of_scales_begin_at_16_bytes(rows) -> None:
    # The second copy is moved up by one.
    assert scale_columns(rows) >= rows + 1
    assert scale_columns(rows) % 4 == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden", 200), ("inner", 64), ("top_k", 0), ("limit", 0.0), ("scale_form", "other")],
)
def test_other_configurations_are_refused_by_name(name, value) -> None:
    options = {"hidden": 512, "inner": 256} | {name: value}
    with pytest.raises(ValueError, match=name):
        ExpertsConfig(**options)
