"""Plans of Blackwell's FP8 linear: order of the sums, budgets, and which tiling a launch takes."""

from __future__ import annotations

import pytest

from dsv4.arch import SM_100A
from dsv4.kernels.gemm.config import MAX_IN_FEATURES, Fp8LinearConfig
from dsv4.kernels.gemm.sm100.plan import (
    choose,
    is_promoted,
    num_slices,
    plan_of,
    representative,
    tilings,
)
from dsv4.kernels.kit.plan import TMEM_COLUMNS
from dsv4.ops.fp8_linear import MODEL_LAYERS

pytestmark = pytest.mark.stage("projections")

WIDTHS = (512, 1536, 4096, 7168, MAX_IN_FEATURES)
ROWS = (1, 1536, 4096, 9473, 65536)
SCALE_DTYPES = ("float8_e8m0fnu", "float32")


def configs() -> list[Fp8LinearConfig]:
    return [
        Fp8LinearConfig(width, rows, x_dtype, scale_dtype)
        for width in WIDTHS
        for rows in ROWS
        for x_dtype in ("bfloat16", "float8_e4m3fn")
        for scale_dtype in SCALE_DTYPES
    ]


def test_slices_of_the_models() -> None:
    found = {
        label: num_slices(Fp8LinearConfig(width, rows))
        for label, (rows, width) in MODEL_LAYERS.items()
    }
    assert found == {
        "Flash wq_a": 8, "Flash wq_b": 1, "Flash wkv": 8, "Flash wo_b": 4, "Flash shared w1": 8,
        "Flash shared w2": 4, "Flash indexer wq_b": 2, "Pro wq_a": 8, "Pro wq_b": 1, "Pro wkv": 8,
        "Pro wo_b": 2, "Pro shared w1": 4, "Pro shared w2": 2, "Pro indexer wq_b": 2,
    }  # fmt: skip


def test_every_tiling_fits_and_covers_k() -> None:
    for config in configs():
        for tiling in tilings(config):
            plan = plan_of(config, tiling)
            assert plan.cta_blocks * tiling.cluster * 128 == config.in_features
            assert plan.own_slices * plan.slice_blocks == plan.cta_blocks
            assert plan.smem.total_bytes <= plan.capacity
            assert plan.capacity * plan.ctas_per_sm < SM_100A.smem_per_sm
            assert plan.tmem.allocated_columns * plan.ctas_per_sm <= TMEM_COLUMNS
            assert plan.registers.at_launch * plan.warps.threads <= SM_100A.registers_per_sm
            assert plan.is_promoted == is_promoted(config)


def test_configurations_with_the_same_tilings_share_kernels() -> None:
    for config in configs():
        compiled = representative(config)
        assert tilings(compiled) == tilings(config)
        assert num_slices(compiled) == num_slices(config)
        assert representative(compiled) == compiled


def test_heads_stay_whole_in_what_is_compiled() -> None:
    config = Fp8LinearConfig(1024, 32768, "float8_e4m3fn", epilogue="head_rotation:512")
    compiled = representative(config)
    assert compiled.out_features % 512 == 0 and num_slices(compiled) == num_slices(config)


@pytest.mark.parametrize(
    ("rows", "width", "tokens", "expected"),
    [
        (1024, 4096, (1, 8, 9, 16, 17, 64), (8, 8, 16, 16, 64, 64)),
        (32768, 1024, (1, 64, 256, 4096), (8, 64, 256, 256)),
    ],
)
def test_chosen_tiles_hold_few_tokens_at_once(rows, width, tokens, expected) -> None:
    config = Fp8LinearConfig(width, rows)
    found = [tilings(config)[choose(config, count, SM_100A.num_sms)].tokens for count in tokens]
    assert tuple(found) == expected


def test_a_plan_prints_its_budgets() -> None:
    config = Fp8LinearConfig(4096, 1024)
    text = str(plan_of(config, tilings(config)[1]))
    assert "8 CTAs a tile" in text and "weight_scales" in text and "partials" in text
