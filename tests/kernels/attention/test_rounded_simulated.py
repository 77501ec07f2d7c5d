"""Paged kernels of both architectures whose output is codes, simulated: values that are not finite,
and tokens in other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.attention.paged_plan import rounds_rows, workspace_size
from dsv4.testing.harness import simulator
from dsv4.testing.paged_attention import Case, assert_codes_of, make_inputs
from dsv4.testing.paged_kernel import compiled_kernel

pytestmark = [pytest.mark.stage("op"), pytest.mark.slow]

cutlass = pytest.importorskip("cutlass")

CODES = {"rounds_output": True}


@pytest.mark.parametrize(
    ("arch", "heads", "kv_format", "splits"),
    [
        ("sm_90a", 40, "bf16", 1),
        ("sm_90a", 40, "fp8", 1),
        ("sm_90a", 40, "bf16", 3),
        ("sm_100a", 64, "bf16", 1),
        ("sm_100a", 128, "fp8", 1),
        ("sm_100a", 128, "bf16", 2),
    ],
)
def test_rows_that_are_not_finite(arch, heads, kv_format, splits, seed) -> None:
    """A query of NaN, queries of infinity, and a key with one of these."""
    target = simulator(arch)
    case = Case(5, 1, heads, 512, kv_format, 40, 100, **CODES)
    inputs = make_inputs(case, seed)
    inputs.q[1, 3, 5], inputs.q[2, 4:9] = torch.nan, torch.inf
    page, entry = divmod(int(inputs.window_indices[3, 7]), case.window_page)
    if kv_format == "bf16":
        inputs.window_pool[page, entry, 130] = torch.inf
    else:  # records of a page come first, of 576 bytes each
        inputs.window_pool[page].flatten()[entry * 576 + 130] = 0xFF
    exact = replace(inputs, case=replace(case, rounds_output=False))
    # So many that pairs of CTAs have a token each, which they round themselves.
    scalars = (splits, 12, 0, 0)
    assert rounds_rows(case.config, case.tokens, *scalars[:2], arch)
    outcomes = []
    for one in (exact, inputs):
        call = one.call(scalars, workspace_size(case.config, {"T": case.tokens}, scalars))
        # The largest scores would make it one split.
        for name in ("max_logits", "lse"):
            call.options[name] = call.outputs.pop(name, torch.empty(0, heads))[:0]
        outcomes.append(target.run(compiled_kernel(target, one.case), call, "lazy", seed))
    rows, rounded = outcomes
    assert rows["o"][1:4].isfinite().logical_not().any()
    assert_codes_of(rounded.outputs, rows["o"])


@pytest.mark.parametrize(
    ("arch", "heads", "ctas"), [("sm_90a", 40, 3), ("sm_100a", 64, 3), ("sm_100a", 128, 24)]
)
def test_codes_of_a_token_do_not_depend_on_the_batch(arch, heads, ctas, seed) -> None:
    """With 24 CTAs pairs round rows themselves, with two a launch behind them does."""
    target = simulator(arch)
    case = Case(11, 1, heads, 512, "fp8", 40, 100, **CODES)
    inputs = make_inputs(case, seed)
    kernel = compiled_kernel(target, case)
    together = target.run(kernel, inputs.call((1, ctas, 0, 0)), "random", seed)
    some = inputs.of_tokens(slice(8, 11))
    some = replace(some, case=replace(case, requests=3))
    alone = target.run(kernel, some.call((1, 2, 0, 0)), "random", seed)
    for first in (0, 8):  # of a term, and of the other
        own = alone["codes"].view(torch.uint8)[first : first + 3]
        assert torch.equal(own, together["codes"].view(torch.uint8)[16 + first :][:3])
