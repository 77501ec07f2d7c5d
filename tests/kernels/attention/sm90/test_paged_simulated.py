"""The paged Hopper kernels, simulated: lists and tables, rows and FP8 entries, splits, options.

Every cache row that no token names is NaN, index lists hold values that are no slots, and every
schedule is checked for races: cp.async and stores of one warpgroup feed the products of others.
"""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.harness import SCHEDULES, simulator
from dsv4.testing.paged_attention import Case, make_inputs
from dsv4.testing.paged_kernel import compiled_kernel, run_case

pytestmark = pytest.mark.stage("H")

cutlass = pytest.importorskip("cutlass")

SIMULATOR = simulator("sm_90a")
PADDED = {"ragged": True, "padded": True, "has_rope": True}
OPTIONS = {**PADDED, "has_factor": True, "has_signs": True}


def check(case: Case, seed: int, splits: int = 1, ctas: int = 3, schedules=SCHEDULES) -> None:
    """Compile, run in every schedule, and compare with the oracle."""
    for _ in run_case(SIMULATOR, case, seed, splits, ctas, schedules):
        pass


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 8, 64, "bf16", 40, 100, 53, 2, wild=True, **OPTIONS),
        Case(2, 2, 40, 64, "bf16", 70, 150, 2, 61, "table", wild=True, **OPTIONS),
        pytest.param(
            Case(3, 1, 72, 128, "bf16", 40, 100, 61, 2, "mixed", "swa_gate", wild=True, **OPTIONS),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_rows_of_small_heads(case, seed) -> None:
    check(case, seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 16, 512, "fp8", 40, 100, 64, 53, "list", "swa_gate", wild=True, **OPTIONS),
        pytest.param(
            Case(2, 2, 72, 512, "fp8", 40, 100, 61, 64, "table", uniform=True, **OPTIONS),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(3, 1, 72, 512, "bf16", 40, 150, wild=True, **OPTIONS), marks=pytest.mark.slow
        ),
        pytest.param(
            Case(4, 1, 64, 512, "fp8", 40, 150, 64, 2, wild=True, **OPTIONS), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_latents(case, seed) -> None:
    """head_dim 512; with so few CTAs each has several tokens, whose Q passes through the ring."""
    check(case, seed, ctas=2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(8, 64), (40, 64), (72, 128), (16, 512), (64, 512), (72, 512)])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_squares_in_place_of_factors(size, kv_format, seed) -> None:
    """Parts of a head's sum are 4, 8 or 32."""
    if (kv_format, size[1]) in (("fp8", 64), ("fp8", 128)):
        pytest.skip("kernels read FP8 entries of 512 channels")
    check(
        Case(3, 1, *size, kv_format, 40, 100, wild=True, has_squares=True, **PADDED), seed, ctas=2
    )


@pytest.mark.parametrize("heads", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_a_code_of_nan_is_nan_whatever_its_scale(heads, seed) -> None:
    """In a key of the middle token alone; the tokens beside it do not notice."""
    case = Case(3, 1, heads, 512, "fp8", 40, 100)
    inputs = make_inputs(case, seed)
    slot = int(inputs.compressed_indices[1, 70])
    page, entry = divmod(slot, case.entry_page)
    # The records of a page come first, of 576 bytes each.
    frame = inputs.compressed_pool[page].flatten()
    frame[entry * 576 + 130] = 0xFF
    o, lse, _ = inputs.expected()
    assert o[1].isnan().all() and not o[::2].isnan().any()
    call = inputs.call((1, 3, case.config.sliding_window, case.config.ratio))
    outcome = SIMULATOR.run(compiled_kernel(SIMULATOR, case), call, SCHEDULES[0], seed)
    for name, wanted in (("o", o), ("lse", lse)):
        assert torch.equal(outcome[name].isnan(), wanted.isnan()), name
        torch.testing.assert_close(outcome[name][::2].float(), wanted[::2], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("sink_mode", ["softmax", pytest.param("swa_gate", marks=pytest.mark.slow)])
def test_splits(seed, sink_mode) -> None:
    case = Case(2, 1, 8, 64, "bf16", 70, 200, sink_mode=sink_mode, wild=True, **OPTIONS)
    check(case, seed, splits=3, ctas=6)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [40, 64])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_splits_of_latents(seed, heads, kv_format) -> None:
    case = Case(2, 1, heads, 512, kv_format, 70, 200, wild=True, **OPTIONS)
    check(case, seed, splits=3, ctas=12, schedules=("lazy", "random"))


def test_a_compressed_pool_may_be_absent(seed) -> None:
    """Entries that no one passes are as aligned as those of a pool."""
    check(Case(3, 1, 16, 512, "fp8", 128, 0, sink_mode="swa_gate", ragged=True), seed, ctas=2)
