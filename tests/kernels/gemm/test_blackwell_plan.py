"""Plans of Blackwell's linears: order of the sums, budgets, and which tiling a launch takes."""

from __future__ import annotations

import pytest

from dsv4.arch import SM_100A
from dsv4.kernels.gemm.config import MAX_IN_FEATURES, Fp8LinearConfig
from dsv4.kernels.gemm.epilogues import ArgMax
from dsv4.kernels.gemm.grouped_config import CODES, GroupedLinearConfig
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.sm100 import grouped_plan, merged_plan, plain_plan
from dsv4.kernels.gemm.sm100.plan import (
    LinearPlan,
    choose,
    is_promoted,
    num_slices,
    plan_of,
    representative,
    tilings,
)
from dsv4.kernels.kit.plan import TMEM_COLUMNS
from dsv4.ops.fp8_linear import MODEL_LAYERS
from dsv4.ops.grouped_linear import MODEL_GROUPS
from dsv4.ops.merged_linear import MODEL_INPUTS
from dsv4.ops.plain_linear import MODEL_HEADS

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
            check_budgets(plan)
            assert plan.is_promoted == is_promoted(config)


def check_budgets(plan: LinearPlan) -> None:
    assert plan.cta_blocks * plan.tiling.cluster * plan.kind.step == plan.in_features
    assert plan.own_slices * plan.slice_blocks == plan.cta_blocks
    assert plan.smem.total_bytes <= plan.capacity
    assert plan.capacity * plan.ctas_per_sm < SM_100A.smem_per_sm
    assert plan.tmem.allocated_columns * plan.ctas_per_sm <= TMEM_COLUMNS
    assert plan.registers.at_launch * plan.warps.threads <= SM_100A.registers_per_sm


def test_every_tiling_of_the_other_linears_fits() -> None:
    widths = (512, MAX_IN_FEATURES // 2)
    for dtype in ("bfloat16", CODES):
        for given in (*MODEL_GROUPS.values(), *((width, 256, 3) for width in widths)):
            for scale_dtype in SCALE_DTYPES:
                config = GroupedLinearConfig(*given, "bf16", scale_dtype, dtype)
                for tiling in grouped_plan.tilings(config):
                    check_budgets(grouped_plan.plan_of(config, tiling))
    for config in merged_configs():
        for tiling in merged_plan.tilings(config):
            kinds = merged_plan.plans(config, tiling)
            assert [plan.kind for plan in kinds] == list(config.kinds)
            for plan in kinds:
                check_budgets(plan)
            # One launch has one shape of CTA.
            assert len({(plan.warps.threads, plan.slices) for plan in kinds}) == 1
    for given in (*MODEL_HEADS.values(), (MAX_IN_FEATURES, 1)):
        for tiling in plain_plan.TILINGS:
            for epilogue in (None, ArgMax()):
                check_budgets(plain_plan.plan_of(PlainLinearConfig(*given), tiling, epilogue))


def merged_configs() -> list[MergedLinearConfig]:
    small = (16384, "1 float32 float32, 1 bfloat16 float32"), (512, "136 float32 bfloat16")
    given = (*MODEL_INPUTS.values(), *small)
    return [MergedLinearConfig(*config, has_codes) for config in given for has_codes in (0, 1)]


def test_slices_of_the_other_linears() -> None:
    groups = {label: num_slices(GroupedLinearConfig(*g)) for label, g in MODEL_GROUPS.items()}
    assert groups == {"Flash wo_a": 2, "Pro wo_a": 1}
    found = {
        label: merged_plan.num_slices(MergedLinearConfig(*given))
        for label, given in MODEL_INPUTS.items()
    }
    assert found == {
        "Flash CSA x": 4, "Flash HCA x": 4, "Flash SWA x": 8, "Flash CSA latent": 1,
        "Flash shared x": 4, "Pro CSA x": 4, "Pro HCA x": 4, "Pro SWA x": 8, "Pro CSA latent": 1,
    }  # fmt: skip


def test_chosen_tiles_of_the_other_linears() -> None:
    """By tokens: tokens of a tile, and CTAs that share its slices."""
    counts, found = (1, 16, 64, 256, 4096), {}
    for label in ("Flash CSA x", "Flash CSA latent"):
        config = MergedLinearConfig(*MODEL_INPUTS[label])
        every = merged_plan.tilings(config)
        chosen = [every[merged_plan.choose(config, n, SM_100A.num_sms)] for n in counts]
        found[label] = [(tiling.tokens, tiling.cluster) for tiling in chosen]
    config = GroupedLinearConfig(*MODEL_GROUPS["Flash wo_a"])
    every = grouped_plan.tilings(config)
    chosen = [every[grouped_plan.choose(config, n, SM_100A.num_sms)] for n in counts]
    found["Flash wo_a"] = [(tiling.tokens, tiling.cluster) for tiling in chosen]
    assert found == {
        "Flash CSA x": [(8, 4), (16, 4), (64, 4), (128, 4), (128, 2)],
        "Flash CSA latent": [(8, 1), (16, 1), (64, 1), (256, 1), (256, 1)],
        "Flash wo_a": [(8, 2), (16, 2), (64, 2), (128, 1), (128, 1)],
    }
    heads = [plain_plan.TILINGS[plain_plan.choose(n)].tokens for n in counts]
    assert heads == [16, 16, 64, 256, 256]


def test_bf16_products_of_few_tokens_have_columns_of_the_next() -> None:
    config = MergedLinearConfig(*MODEL_INPUTS["Flash CSA x"])
    found = [plan.columns for plan in merged_plan.plans(config, merged_plan.tilings(config)[0])]
    assert found == [16, 8]


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
