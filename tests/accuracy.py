"""When a computed attention counts as equal to the FP32 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Bounds on an output against the oracle, for inputs of unit scale."""

    relative: float  # Frobenius norm of the difference over that of the oracle
    cosine: float
    elementwise: float  # absolute and relative
    lse: float  # absolute


BFLOAT16 = Tolerance(relative=4e-3, cosine=0.99999, elementwise=5e-3, lse=1e-4)
# The same sums in another order: a few units in the last place.
FLOAT32 = Tolerance(relative=2e-6, cosine=0.9999999, elementwise=2e-5, lse=2e-5)
LSE_ROUNDING = 4e-7  # relative: float32 keeps 24 bits
TOLERANCES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}


def assert_attention_close(
    o: Tensor, expected_o: Tensor, lse: Tensor | None = None, expected_lse: Tensor | None = None
) -> None:
    """Check an output [T, n_h, d], and lse [T, n_h] where given; the dtype of `o` sets the bounds.

    A token whose oracle is exactly zero must be exactly zero. Infinite lse must agree exactly.
    """
    tolerance = TOLERANCES[o.dtype]
    assert o.shape == expected_o.shape, f"o: shape {o.shape}, oracle {expected_o.shape}"
    actual, expected = o.double().cpu(), expected_o.double().cpu()
    assert actual.isfinite().all(), f"o: {(~actual.isfinite()).sum()} elements are not finite"
    silent = (expected == 0).all(-1)
    assert (actual[silent] == 0).all(), "o: a token and head without weight must give exactly 0"
    if expected.any():
        relative = ((actual - expected).norm() / expected.norm()).item()
        assert relative <= tolerance.relative, f"o: relative Frobenius error {relative:.2e}"
        cosine = torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0).item()
        assert cosine >= tolerance.cosine, f"o: cosine {cosine:.8f}"
        bound = tolerance.elementwise
        torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)
    if lse is not None:
        assert_lse_close(lse, expected_lse, tolerance.lse)


def assert_lse_close(lse: Tensor, expected: Tensor, bound: float = BFLOAT16.lse) -> None:
    """Check lse [T, n_h]; infinities must agree, NaN never passes.

    The bound is absolute, widened by a few units in the last place where lse is in the thousands.
    """
    actual, expected = lse.double().cpu(), expected.double().cpu()
    assert not actual.isnan().any(), "lse: NaN"
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite]), "lse: infinities differ"
    actual, expected = actual[~infinite], expected[~infinite]
    excess = (actual - expected).abs() - LSE_ROUNDING * expected.abs()
    assert (excess <= bound).all(), f"lse: off by {excess.max().item():.2e}"
