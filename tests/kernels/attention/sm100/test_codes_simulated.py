"""The paged Blackwell kernel that multiplies FP8 codes, simulated: one and two terms, any schedule.

Every cache row that no token names is NaN, and index lists hold values that are no slots.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.testing.accuracy import Accuracy
from dsv4.testing.harness import SCHEDULES, run_all
from dsv4.testing.paged_attention import assert_paged_close, make_inputs
from tests.kernels.attention.codes import SimulatedCodes, call_of, latents, set_scale, shifted

pytestmark = [pytest.mark.stage("D5c"), pytest.mark.slow]

cutlass = pytest.importorskip("cutlass")

CODES = SimulatedCodes("sm_100a")
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True}


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
    CODES.check(case, seed)


@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
def test_references_follow_growing_scores(compute, seed) -> None:
    CODES.check(latents(64, compute, 70, 330, growing=True, has_squares=True), seed)


def test_two_terms_are_closer_by_an_order_of_magnitude(seed) -> None:
    errors = {}
    for compute in ("fp8", "fp8x2"):
        inputs = make_inputs(latents(64, compute, 70, 200), seed)
        outcome = CODES.check(inputs.case, seed, inputs, SCHEDULES[:1])
        errors[compute] = Accuracy.of(outcome["o"], inputs.expected()[0]).relative
    assert errors["fp8"] > 8e-3, errors
    assert errors["fp8x2"] < 3e-3, errors


def test_values_with_a_mean(seed) -> None:
    """What a sum of codes that is kept over all tiles would lose: each loses bits of it."""
    case = latents(64, "fp8x2", 128, 1024)
    inputs = make_inputs(replace(case, uniform=False), seed)
    pools = [shifted(pool) for pool in (inputs.window_pool, inputs.compressed_pool)]
    inputs = replace(inputs, window_pool=pools[0], compressed_pool=pools[1], case=case)
    outcome = CODES.check(case, seed, inputs, SCHEDULES[:1])
    assert Accuracy.of(outcome["o"], inputs.expected()[0]).relative < 2.5e-3


@pytest.mark.parametrize("scale", [0, 20, 100, 130])
def test_scales_of_any_size(scale, seed) -> None:
    """Keys whose scales are far apart: the weights of the smaller ones are large, and finite."""
    inputs = make_inputs(latents(64, "fp8x2", 40, 100), seed)
    set_scale(inputs, 1, 70, scale)
    # What scores by so large a value would be infinite.
    set_scale(inputs, 2, 20, min(scale, 130))
    CODES.check(inputs.case, seed, inputs, SCHEDULES[:1], is_unit_scale=False)


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
        outcome = CODES.simulator.run(CODES.kernel_of(case), call_of(inputs), SCHEDULES[0], seed)
        for name, wanted in (("o", o), ("lse", lse)):
            assert torch.equal(outcome[name].isnan(), wanted.isnan()), (place, name)
            torch.testing.assert_close(
                outcome[name][::2].float(), wanted[::2], atol=2e-2, rtol=2e-2
            )


def test_a_token_has_the_same_bits_in_any_batch(seed) -> None:
    """Alone, as one of three, and whatever CTA computes it."""
    case = latents(72, "fp8x2", 40, 150, 61, 53, has_rope=True)
    inputs = make_inputs(case, seed)
    kernel = CODES.kernel_of(case)
    whole = CODES.simulator.run(kernel, call_of(inputs), SCHEDULES[0], seed)
    other = CODES.simulator.run(kernel, call_of(inputs, 6), SCHEDULES[2], seed)
    whole.assert_same_bits(other, "6 CTAs")
    alone = CODES.simulator.run(kernel, call_of(inputs.of_tokens(slice(1, 2))), SCHEDULES[1], seed)
    for name in ("o", "lse"):
        assert torch.equal(alone[name][0], whole[name][1]), name


def test_launches_with_splits_multiply_values(seed) -> None:
    """The compiled function takes either."""
    from dsv4.testing.paged_kernel import run_case

    case = latents(72, "fp8x2", 70, 200)
    for splits in (1, 3):
        for _ in run_case(CODES.simulator, case, seed, splits, 4, SCHEDULES[2:]):
            pass


def test_a_cluster_goes_through_tokens_without_keys(seed) -> None:
    """Beside others: rings and turns go on where there is no tile."""
    case = replace(latents(72, "fp8x2", 70, 330, ragged=True), requests=5)
    inputs = make_inputs(case, seed)
    for lens in (inputs.window_lens, inputs.compressed_lens):
        lens[[0, 2, 4]] = 0
    inputs.compressed_lens[1] = inputs.window_lens[3] = 0
    CODES.check(case, seed, inputs)


def test_a_launch_without_largest_scores(seed) -> None:
    """Nothing but the epilogue makes the weights of the next token wait until all of O is read."""
    case = replace(latents(72, "fp8x2", 70, 200), requests=4)
    inputs = make_inputs(case, seed)
    kernel = CODES.kernel_of(case)
    outcome = run_all(
        CODES.simulator, kernel, lambda: call_of(inputs, has_largest=False), seed, SCHEDULES
    )
    largest = inputs.expected()[2]
    assert_paged_close(inputs, outcome["o"], outcome["lse"], largest)


def test_infinite_gates(seed) -> None:
    """They move a maximum of -inf, or leave the sums of one branch alone."""
    case = latents(72, "fp8x2", 70, 200, sink_mode="swa_gate", wild=True)
    inputs = make_inputs(case, seed)
    sinks = inputs.sink_logits.clone()
    sinks[:4] = torch.tensor([torch.inf, -torch.inf, 60.0, -60.0])
    inputs.compressed_indices[:, :64] = -1
    CODES.check(case, seed, replace(inputs, sink_logits=sinks))
