"""The paged Blackwell kernels, simulated: lists and tables, rows and FP8 entries, splits, options.

Every cache row that no token names is NaN, index lists hold values that are no slots, and every
schedule is checked for races.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.kernels.attention.sm100.plan_paged import PagedPlan1Cta, PagedPlan2Cta
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.attention import Inputs as DenseInputs
from dsv4.testing.harness import simulator
from dsv4.testing.paged_attention import Case, Inputs, make_inputs
from dsv4.testing.paged_kernel import run_case

pytestmark = pytest.mark.stage("D5c")

SIMULATOR = simulator("sm_100a")
PADDED = {"ragged": True, "padded": True, "has_rope": True}
OPTIONS = {**PADDED, "has_factor": True}


def check(case: Case, seed: int, splits: int = 1, ctas: int = 2, **options) -> None:
    """Compile, run in every schedule, and compare with the oracle."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    for _ in run_case(SIMULATOR, case, seed, splits, ctas, **options):
        pass


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def test_plans_have_room_for_words_about_tiles() -> None:
    """Beside as many stages as dense keys have."""
    for is_fp8 in (False, True):
        one, two = PagedPlan1Cta(512, is_fp8=is_fp8), PagedPlan2Cta(is_fp8=is_fp8)
        assert (one.kv_stages, two.kv_stages) == (4, 6)
        for plan in (one, two):
            expected = 128 * (2 if plan is two else 1) if is_fp8 else 1
            assert plan.barriers.full_arrivals("kv") == expected
            assert plan.barriers.empty_arrivals("info") == 4
            assert "info" in str(plan)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 8, 64, "bf16", 40, 100, 53, 2, wild=True, **OPTIONS),
        *slow(
            Case(2, 2, 40, 64, "bf16", 70, 150, 2, 61, "table", wild=True, **OPTIONS),
            Case(3, 1, 72, 128, "bf16", 40, 100, 61, 2, "mixed", "swa_gate", wild=True, **OPTIONS),
        ),
    ],
    ids=str,
)
def test_rows_of_small_heads(case, seed) -> None:
    check(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 16, 512, "bf16", 40, 150, wild=True, **OPTIONS),
        Case(2, 2, 72, 512, "bf16", 40, 150, 53, 2, "table", growing=True, **OPTIONS),
        Case(2, 1, 16, 512, "fp8", 40, 100, 64, 53, "list", "swa_gate", wild=True, **OPTIONS),
        Case(2, 2, 72, 512, "fp8", 40, 100, 61, 2, "table", **OPTIONS),
        Case(3, 1, 128, 512, "fp8", 128, 0, sink_mode="swa_gate", ragged=True),
    ],
    ids=str,
)
def test_latents(case, seed) -> None:
    """head_dim 512; more than 64 heads are computed by pairs of CTAs, of which there is one."""
    check(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(8, 64), (16, 512), (72, 512)])
def test_squares_in_place_of_factors(size, seed) -> None:
    kv_format = "fp8" if size[1] == 512 else "bf16"
    check(Case(3, 1, *size, kv_format, 40, 100, wild=True, has_squares=True, **PADDED), seed)


def test_a_pair_goes_through_several_tokens(seed) -> None:
    case = Case(3, 1, 72, 512, "bf16", 40, 150, wild=True, **OPTIONS)
    check(case, seed, schedules=("random",))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(8, 64), (16, 512), (72, 512)])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_splits(size, kv_format, seed) -> None:
    """A split may see no key but infinite sinks, whose gate moves a maximum of -inf."""
    if (kv_format, size[1]) == ("fp8", 64):
        pytest.skip("kernels read FP8 entries of 512 channels")
    sizes = (2, 1, *size, kv_format, 70, 200)
    case = Case(*sizes, sink_mode="swa_gate", wild=True, **OPTIONS)
    inputs = make_inputs(case, seed)
    sinks = inputs.sink_logits.clone()
    sinks[:2] = torch.tensor([torch.inf, -torch.inf])
    inputs.compressed_indices[:, :64] = -1
    inputs = replace(inputs, sink_logits=sinks)
    check(case, seed, splits=3, ctas=4, schedules=("lazy", "random"), inputs=inputs)


def test_pages_lie_apart_by_less_than_a_row(seed) -> None:
    """Pages and rows share a dimension of the gather's descriptor, whose rows then overlap."""
    case = Case(2, 1, 8, 64, "bf16", 40, 100, 53, 5, wild=True)
    inputs = make_inputs(case, seed)
    pools = {name: _apart(getattr(inputs, name)) for name in ("window_pool", "compressed_pool")}
    check(case, seed, schedules=("eager",), inputs=replace(inputs, **pools))


def _apart(pool: Tensor) -> Tensor:
    """The pool with 48 bytes of NaN behind each page."""
    pages, rows, dim = pool.shape
    wide = pool.new_full((pages, rows * dim + 24), torch.nan)
    view = wide.as_strided(pool.shape, (wide.stride(0), dim, 1))
    return view.copy_(pool)


@pytest.mark.parametrize("size", [(8, 64), *slow((64, 512), (128, 512))])
def test_bits_are_those_of_gathered_keys(size, seed) -> None:
    """Full lists, tile for tile the same keys as rows that were gathered before."""
    from dsv4.testing.attention_kernel import AttentionKernels, config_of

    case = Case(3, 1, *size, "bf16", 70, 150, 53, 5, sink_mode="swa_gate")
    inputs = make_inputs(case, seed)
    ((_, paged),) = run_case(SIMULATOR, case, seed, schedules=("eager",), inputs=inputs)
    backend = AttentionKernels(SIMULATOR)
    gathered = replace(_gathered(inputs), sink_mode=case.sink_mode)
    dense = backend.run(backend.compile(config_of(gathered)), gathered, seed=seed)
    assert_same_bits("o", dense.o, paged["o"])
    assert_same_bits("lse", dense.lse, paged["lse"])


def _gathered(inputs: Inputs) -> DenseInputs:
    """The keys of full lists, copied together."""
    window, compressed = (
        pool.flatten(0, 1)[indices.long()]
        for pool, indices in (
            (inputs.window_pool, inputs.window_indices),
            (inputs.compressed_pool, inputs.compressed_indices),
        )
    )
    tokens, width = inputs.window_indices.shape
    lens = torch.full((tokens,), width, dtype=torch.int32)
    requests = torch.arange(tokens, dtype=torch.int32)
    return DenseInputs(inputs.q, compressed, window, lens, inputs.sink_logits, requests)
