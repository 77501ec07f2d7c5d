"""Plans of the FP8 linear: order of the sums, budgets, and which tiling a launch takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4.arch import SM_90A
from dsv4.kernels.gemm import grouped_plan
from dsv4.kernels.gemm.config import MAX_IN_FEATURES, Fp8LinearConfig, Kind, num_slices
from dsv4.kernels.gemm.plan import (
    LinearPlan,
    Tiling,
    choose,
    clusters_at_once,
    representative,
    spread,
    tilings,
)
from dsv4.ops.fp8_linear import FP8_LINEAR, MODEL_LAYERS
from dsv4.ops.grouped_linear import GROUPED_LINEAR

pytestmark = pytest.mark.stage("projections")

WIDTHS = range(512, MAX_IN_FEATURES + 1, 512)
ROWS = (1, 64, 512, 1536, 2048, 2049, 4096, 7168, 8192, 8449, 65536)
X_DTYPES = ("bfloat16", "float8_e4m3fn")


def test_slices_of_the_models() -> None:
    found = {width: num_slices(width) for _, width in MODEL_LAYERS.values()}
    assert found == {
        1024: 2, 1536: 2, 2048: 4, 3072: 4, 4096: 4, 7168: 4, 8192: 4, 16384: 4,
    }  # fmt: skip


@pytest.mark.parametrize("x_dtype", X_DTYPES)
def test_every_tiling_fits_and_covers_k(x_dtype) -> None:
    for width in WIDTHS:
        for rows in ROWS:
            config = Fp8LinearConfig(width, rows, x_dtype)
            for tiling in tilings(config):
                plan = LinearPlan(width, tiling)
                assert plan.slices * plan.slice_blocks * 128 == width
                assert plan.smem.total_bytes <= plan.capacity
                assert plan.capacity * tiling.ctas_per_sm < SM_90A.smem_per_sm
                assert plan.stages >= 2
                assert not tiling.is_light or plan.own_slices == 1


@pytest.mark.parametrize("kind", Kind)
def test_the_first_filling_of_a_ring_keeps_queues_short(kind) -> None:
    for width in WIDTHS:
        for tiling in tilings(Fp8LinearConfig(width, 4096, "bfloat16")):
            plan = LinearPlan(width, tiling, kind=kind)
            under_way = plan.window * plan.rings * plan.weight_bytes * plan.ctas_per_sm
            assert 0 < under_way <= 64 << 10
            names = [edge.name for edge in plan.barriers.edges]
            waits_for_x = plan.has_streamed_x and not tiling.is_wide
            assert ("filling" in names) == (waits_for_x and plan.window < plan.stages)


def test_short_copies_make_up_a_whole_one() -> None:
    """Swizzles need whole groups of eight rows."""
    for width in WIDTHS:
        for tiling in tilings(Fp8LinearConfig(width, 4096, "float8_e4m3fn")):
            plan = LinearPlan(width, tiling)
            assert plan.short_rows % 8 == 0
            assert plan.columns // tiling.sharing % plan.short_rows == 0


def test_copies_of_a_weight_of_few_rows_bring_no_more() -> None:
    plan = LinearPlan(4096, Tiling(128, True, 1, 2))
    assert [plan.copied_rows(rows) for rows in (1, 64, 65, 4096, None)] == [64, 64, 128, 128, 128]


def test_a_stage_is_on_its_way_while_the_others_are_multiplied() -> None:
    """Of few tokens; with two stages, both under way, Pro's wo_a took 26 % longer. Where resident
    activations leave two, CTAs share them if there are slices to share."""
    plans = {
        label: linear_plan(config, tilings_of(config)[0])
        for op, linear_plan, tilings_of in (
            (FP8_LINEAR, lambda config, t: LinearPlan(config.in_features, t), tilings),
            (GROUPED_LINEAR, grouped_plan.linear_plan, grouped_plan.tilings),
        )
        for label, config in op.aot().items()
    }
    assert all(plan.blocks_under_way < plan.stages for plan in plans.values())
    few = {label for label, plan in plans.items() if plan.stages == 2}
    assert few == {"Pro wo_b, 7168 x 16384"}


def test_the_stack_of_sums_is_a_balanced_tree() -> None:
    for cluster in (1, 2, 4):
        plan = LinearPlan(4096, Tiling(64, True, cluster))
        stack: list[object] = []
        for s, (level, merges) in enumerate(plan.tree):
            assert level == len(stack)
            stack.append(s)
            for merge in merges:
                right = stack.pop()
                assert merge == len(stack) - 1
                stack[merge] = (stack[merge], right)

        def balanced(first: int, count: int) -> object:
            if count == 1:
                return first
            half = count // 2
            return balanced(first, half), balanced(first + half, half)

        assert stack == [balanced(0, plan.own_slices)]


def test_configurations_with_the_same_tilings_share_kernels() -> None:
    for width in (512, 1024, 4096, 16384):
        for rows in ROWS:
            config = Fp8LinearConfig(width, rows)
            compiled = representative(config)
            assert tilings(compiled) == tilings(config)
            assert representative(compiled) == compiled
    assert [spread(rows) for rows in (512, 2048, 4096, 8192, 32768)] == [8, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        # The fastest of the tilings measured on an H200, or within 12 % of it, by tokens.
        (32768, 1024, {1: (8, 1), 16: (16, 1), 64: (64, 1), 128: (128, 1), 256: (128, 1)}),
        (4096, 8192, {1: (8, 2), 16: (16, 4), 64: (64, 4), 128: (128, 2), 256: (128, 2)}),
        (8192, 4096, {1: (8, 1), 16: (16, 2), 64: (64, 2), 128: (128, 2), 256: (128, 1)}),
        (1536, 4096, {1: (8, 2), 16: (16, 4), 64: (64, 4), 256: (64, 2), 512: (128, 2)}),
        (7168, 16384, {1: (8, 2), 16: (16, 2), 64: (64, 2), 128: (128, 2), 256: (128, 1)}),
    ],
)
def test_choice(rows, width, expected) -> None:
    config = Fp8LinearConfig(width, rows)
    found = {tokens: tilings(config)[choose(config, tokens, 132)] for tokens in expected}
    assert {tokens: (t.tokens, t.cluster) for tokens, t in found.items()} == expected


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        # 512 and 256 tiles, 64 and 32, 128 and 64, 24 and 12; the second of four CTAs but for 8192.
        (32768, 1024, {8: False, 16: False}),
        (4096, 8192, {8: True, 16: False}),
        (8192, 4096, {8: True, 16: True}),
        (1536, 4096, {8: True, 16: True}),
    ],
)
def test_rings_are_deep_where_every_cluster_finds_a_place(rows, width, expected) -> None:
    assert [clusters_at_once(ctas, 132) for ctas in (1, 2, 4)] == [132, 66, 28]
    few = [t for t in tilings(Fp8LinearConfig(width, rows)) if t.tokens <= 16]
    assert {tiling.tokens: tiling.is_deep for tiling in few} == expected
    for tiling in few:
        plain = replace(tiling, is_deep=False)
        stages = LinearPlan(width, tiling).stages, LinearPlan(width, plain).stages
        assert tiling.ctas_per_sm == (1 if tiling.is_deep else 2)
        assert stages[0] > 2 * stages[1] if tiling.is_deep else stages[0] == stages[1]


def test_a_choice_exists_for_any_number_of_tokens() -> None:
    for x_dtype in X_DTYPES:
        for rows in ROWS:
            config = Fp8LinearConfig(4096, rows, x_dtype)
            for tokens in (1, 8, 9, 16, 17, 64, 65, 1000, 100_000):
                assert 0 <= choose(config, tokens, 132) < len(tilings(config))


def test_a_plan_shows_its_budgets() -> None:
    text = str(LinearPlan(4096, Tiling(8, False, 2)))
    for part in ("K 4096 in 4 slices", "288 threads", "of 115712 bytes", "ring", "partials"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 768}, "in_features must be a multiple of 512 up to 16384, got 768"),
        ({"in_features": 0}, "in_features must be .* got 0"),
        ({"in_features": 32768}, "in_features must be .* got 32768"),
        ({"out_features": 0}, "out_features must be positive, got 0"),
        ({"x_dtype": "float16"}, "x_dtype must be one of .* got 'float16'"),
        ({"scale_dtype": "bfloat16"}, "scale_dtype must be one of .* got 'bfloat16'"),
        ({"out_dtype": "float16"}, "out_dtype must be one of .* got 'float16'"),
    ],
)
def test_configurations_that_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8LinearConfig(**{"in_features": 512, "out_features": 64, **options})
