"""The paged Blackwell kernel that multiplies FP8 codes, simulated: one and two terms, any schedule.

Every cache row that no token names is NaN, and index lists hold values that are no slots.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.testing.accuracy import Accuracy
from dsv4.testing.harness import SCHEDULES, run_all, simulator
from dsv4.testing.paged_attention import Case, assert_paged_close, make_inputs

pytestmark = [pytest.mark.stage("D5c"), pytest.mark.slow]

cutlass = pytest.importorskip("cutlass")

SIMULATOR = simulator("sm_100a")
CTAS = 2  # so few that each has several tokens
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True}


def kernel_of(case: Case):
    """The kernel without those that launches with splits take, which other tests have."""
    from dsv4.testing.codes_kernel import build_sm100

    return SIMULATOR.compile(build_sm100, SPARSE_FMHA_PAGED.compiled_config(case.config, "sm_100a"))


def call_of(inputs, ctas: int = CTAS):
    """A call of the kernel, with every output."""
    config = inputs.case.config
    return inputs.call((1, ctas, config.sliding_window, config.ratio))


def check(case: Case, seed: int, inputs=None, schedules=SCHEDULES):
    """Run in every schedule, compare the bits, and compare with the oracle."""
    inputs = make_inputs(case, seed) if inputs is None else inputs
    kernel = kernel_of(case)
    outcome = run_all(SIMULATOR, kernel, lambda: call_of(inputs), seed, schedules)
    assert_paged_close(inputs, outcome["o"], outcome["lse"], outcome["max_logits"])
    return outcome


def latents(heads: int, compute: str, *sizes: int, **options) -> Case:
    """Three tokens over uniform entries."""
    names = ("window", "entries", "window_page", "entry_page")
    options |= dict(zip(names, sizes))
    return Case(3, 1, heads, 512, "fp8", uniform=True, compute=compute, **options)


@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
@pytest.mark.parametrize(
    ("heads", "form", "sink_mode"),
    [(72, "list", "softmax"), (72, "mixed", "swa_gate"), (64, "table", "softmax")],
)
def test_products_of_codes(compute, heads, form, sink_mode, seed) -> None:
    """More than one head tile and less than a whole one, lists and tables, and keys that are none
    anywhere in a tile."""
    wild = form != "table"
    sizes = (40, 150, 61, 53)
    case = latents(heads, compute, *sizes, form=form, sink_mode=sink_mode, wild=wild, **OPTIONS)
    check(case, seed)


@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
def test_references_follow_growing_scores(compute, seed) -> None:
    check(latents(64, compute, 70, 330, growing=True, has_squares=True), seed)


def test_two_terms_are_closer_by_an_order_of_magnitude(seed) -> None:
    errors = {}
    for compute in ("fp8", "fp8x2"):
        inputs = make_inputs(latents(64, compute, 70, 200), seed)
        outcome = check(inputs.case, seed, inputs, SCHEDULES[:1])
        errors[compute] = Accuracy.of(outcome["o"], inputs.expected()[0]).relative
    assert errors["fp8"] > 8e-3, errors
    assert errors["fp8x2"] < 3e-3, errors


def test_values_with_a_mean(seed) -> None:
    """What a sum of codes that is kept over all tiles would lose: each loses bits of it."""
    case = latents(64, "fp8x2", 128, 1024)
    inputs = make_inputs(replace(case, uniform=False), seed)
    pools = [shifted(pool) for pool in (inputs.window_pool, inputs.compressed_pool)]
    inputs = replace(inputs, window_pool=pools[0], compressed_pool=pools[1], case=case)
    outcome = check(case, seed, inputs, SCHEDULES[:1])
    assert Accuracy.of(outcome["o"], inputs.expected()[0]).relative < 2.5e-3


def shifted(pool: torch.Tensor) -> torch.Tensor:
    """The entries plus a vector that all have in common, packed anew with one scale each."""
    from dsv4.reference.cache_entry import pack_pages
    from dsv4.reference.paged_attention import decoded

    rows = decoded(pool, 512, 64).nan_to_num(0.0).unflatten(0, pool.shape[:2])
    rows = rows + 4 * torch.randn(512, generator=torch.Generator().manual_seed(3))
    packed = pack_pages(rows, uniform_scale=True)
    size, row = pool.shape[1:]
    return packed[:, : size * row].unflatten(1, (size, row))


@pytest.mark.parametrize("scale", [0, 20, 100, 130])
def test_scales_of_any_size(scale, seed) -> None:
    """Keys whose scales are far apart: the weights of the smaller ones are large, and finite."""
    inputs = make_inputs(latents(64, "fp8x2", 40, 100), seed)
    set_scale(inputs, 1, 70, scale)
    # What scores by so large a value would be infinite.
    set_scale(inputs, 2, 20, min(scale, 130))
    check(inputs.case, seed, inputs, SCHEDULES[:1])


def test_a_code_of_nan_and_a_scale_of_nan_make_a_token_nan(seed) -> None:
    case = latents(64, "fp8x2", 40, 100)
    for place in ("code", "scale"):
        inputs = make_inputs(case, seed)
        if place == "scale":
            set_scale(inputs, 1, 70, 255)
        else:
            slot = int(inputs.compressed_indices[1, 70])
            page, entry = divmod(slot, case.entry_page)
            inputs.compressed_pool[page].flatten()[entry * 576 + 130] = 0xFF
        o, lse, _ = inputs.expected()
        assert o[1].isnan().all() and not o[::2].isnan().any()
        outcome = SIMULATOR.run(kernel_of(case), call_of(inputs), SCHEDULES[0], seed)
        for name, wanted in (("o", o), ("lse", lse)):
            assert torch.equal(outcome[name].isnan(), wanted.isnan()), (place, name)
            torch.testing.assert_close(
                outcome[name][::2].float(), wanted[::2], atol=2e-2, rtol=2e-2
            )


def set_scale(inputs, token: int, place: int, scale: int) -> None:
    """Give an entry that a token names another scale for all of its groups."""
    case = inputs.case
    page, entry = divmod(int(inputs.compressed_indices[token, place]), case.entry_page)
    frame = inputs.compressed_pool[page].flatten()
    start = case.entry_page * 576 + entry * 8
    frame[start : start + 7] = scale


def test_a_token_has_the_same_bits_in_any_batch(seed) -> None:
    """Alone, as one of three, and whatever CTA computes it."""
    case = latents(72, "fp8x2", 40, 150, 61, 53, has_rope=True)
    inputs = make_inputs(case, seed)
    kernel = kernel_of(case)
    whole = SIMULATOR.run(kernel, call_of(inputs), SCHEDULES[0], seed)
    other = SIMULATOR.run(kernel, call_of(inputs, 6), SCHEDULES[2], seed)
    whole.assert_same_bits(other, "6 CTAs")
    alone = SIMULATOR.run(kernel, call_of(inputs.of_tokens(slice(1, 2))), SCHEDULES[1], seed)
    for name in ("o", "lse"):
        assert torch.equal(alone[name][0], whole[name][1]), name


def test_launches_with_splits_multiply_values(seed) -> None:
    """The compiled function takes either."""
    from dsv4.testing.paged_kernel import run_case

    case = latents(72, "fp8x2", 70, 200)
    for splits in (1, 3):
        for _ in run_case(SIMULATOR, case, seed, splits, 4, SCHEDULES[2:]):
            pass


def test_a_cluster_goes_through_tokens_without_keys(seed) -> None:
    """Beside others: rings and turns go on where there is no tile."""
    case = replace(latents(72, "fp8x2", 70, 330, ragged=True), requests=5)
    inputs = make_inputs(case, seed)
    for lens in (inputs.window_lens, inputs.compressed_lens):
        lens[[0, 2, 4]] = 0
    inputs.compressed_lens[1] = inputs.window_lens[3] = 0
    check(case, seed, inputs)


def test_infinite_gates(seed) -> None:
    """They move a maximum of -inf, or leave the sums of one branch alone."""
    case = latents(72, "fp8x2", 70, 200, sink_mode="swa_gate", wild=True)
    inputs = make_inputs(case, seed)
    sinks = inputs.sink_logits.clone()
    sinks[:4] = torch.tensor([torch.inf, -torch.inf, 60.0, -60.0])
    inputs.compressed_indices[:, :64] = -1
    check(case, seed, replace(inputs, sink_logits=sinks))
