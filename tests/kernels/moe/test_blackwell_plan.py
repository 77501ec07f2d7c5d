"""Plans of the experts' products on Blackwell, and the division of their tiles."""

from __future__ import annotations

import pytest

from dsv4.arch import SM_100A
from dsv4.kernels.kit.plan import TMEM_COLUMNS
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.sm100.plan import ProductPlan, Tiling, choose, is_promoted, tilings

pytestmark = pytest.mark.stage("moe")

FP8 = {"expert_dtype": "fp8"}
FP32 = {**FP8, "scale_dtype": "float32", "shared_scale_dtype": "float32"}
NVFP4 = {"expert_dtype": "nvfp4"}
CONFIGS = [
    ExpertsConfig(hidden, inner, scale_form="tiled", **fields)
    for hidden, inner in ((4096, 2048), (7168, 3072), (512, 128))
    for fields in ({}, FP8, FP32, NVFP4)
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tiling_has_a_plan_within_its_budgets(config) -> None:
    for tiling in tilings(config):
        for plan in (ProductPlan.gate_and_up(config, tiling), ProductPlan.down(config, tiling)):
            assert plan.smem.total_bytes <= plan.capacity < SM_100A.smem_per_sm
            assert plan.tmem.allocated_columns <= TMEM_COLUMNS
            assert plan.registers.at_launch * plan.warps.threads <= SM_100A.registers_per_sm
            assert plan.is_promoted == is_promoted(config)
            # The load warp's with its bytes, the scale warp's.
            assert plan.barriers.full_arrivals("ring") == 2
            assert plan.barriers.empty_arrivals("ring") == 1
            assert plan.barriers.empty_arrivals("sums") == 4
            assert "weight_scales" in str(plan)


def test_bytes_of_a_stage() -> None:
    plan = ProductPlan.gate_and_up(CONFIGS[0], Tiling(8, 8))
    # Codes of 128 x 128 in four bits, a scale for each 32, of gate and of up.
    assert plan.loaded_bytes("fp4", 2) == 2 * (128 * 128 // 2 + 128 * 4)
    assert plan.loaded_bytes("fp8", 1) == 128 * 128
    # In shared memory an element of four bits has a byte, too.
    assert plan.smem["weight"].bytes == plan.stages * 2 * 128 * 128


def test_nvfp4_stays_packed() -> None:
    """Gate and up have the room of one weight of the shared expert, whose CTA has one of both."""
    config = CONFIGS[3]
    for tiling in tilings(config):
        up, down = ProductPlan.gate_and_up(config, tiling), ProductPlan.down(config, tiling)
        for plan in (up, down):
            assert plan.smem["weight"].bytes == plan.stages * 128 * 128
            # A scale for each 16, of gate and of up.
            weights = plan.weights
            assert plan.loaded_bytes("nvfp4", weights) == weights * 128 * (128 // 2 + 128 // 16)
            assert plan.smem["weight_scales"].bytes == plan.stages * weights * 128 * 8
            assert plan.smem["x_scales"].bytes == plan.stages * 128 * 8
        assert (up.width, down.width) == (1, 2)
        assert up.stages > ProductPlan.gate_and_up(CONFIGS[0], tiling).stages


def test_a_turn_has_about_as_many_bytes_of_either_kind() -> None:
    for config, up_width, down_width in (
        (CONFIGS[0], 1, 2), (CONFIGS[1], 1, 1), (CONFIGS[3], 1, 2),
    ):  # fmt: skip
        up, down = (
            ProductPlan.gate_and_up(config, Tiling(8, 8)),
            ProductPlan.down(config, Tiling(8, 8)),
        )
        assert (up.width, down.width) == (up_width, down_width)
        for plan in (up, down):
            shared = plan.loaded_bytes("fp8", 1)
            routed = plan.width * plan.loaded_bytes(config.expert_dtype, plan.weights)
            assert 1 / 2 <= shared / routed <= 1


def test_wide_tiles_take_more_than_eight_tokens() -> None:
    found = [
        tilings(CONFIGS[0])[choose(CONFIGS[0], tokens, 256)].tokens for tokens in (1, 8, 9, 4096)
    ]
    assert found == [8, 8, 64, 64]
    promoted = CONFIGS[2]
    assert [choose(promoted, tokens, 256) for tokens in (1, 9, 4096)] == [0, 0, 0]


@pytest.mark.parametrize("tiling", [Tiling(4, 8), Tiling(8, 72), Tiling(128, 64)])
def test_other_tilings_are_refused(tiling) -> None:
    with pytest.raises(AssertionError, match="Tiling"):
        ProductPlan.down(CONFIGS[0], tiling)
