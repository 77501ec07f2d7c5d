"""Tolerances against an FP32 oracle, and the comparison of an output with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Bounds on an output of unit scale.

    Attributes:
        relative: Frobenius norm of the difference over that of the oracle, at most.
        cosine: of output and oracle, at least.
        element: |difference| over 1 + |oracle|, at most: as much absolutely as relatively.
    """

    relative: float
    cosine: float
    element: float


BFLOAT16 = Tolerance(relative=4e-3, cosine=0.99999, element=5e-3)
# The same sums in another order: a few units in the last place.
FLOAT32 = Tolerance(relative=2e-6, cosine=0.9999999, element=2e-5)
TOLERANCES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}


@dataclass(frozen=True)
class Accuracy:
    """Distance of an output from its oracle, in the terms of `Tolerance`; NaN where it has one."""

    relative: float
    cosine: float
    element: float
    worst: str  # the element that is off most: its index, what it is and what it should be

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Accuracy:
        """Compare two tensors of one shape; the oracle moves to the output's device."""
        assert actual.shape == expected.shape, f"shape {actual.shape}, oracle {expected.shape}"
        got, wanted = actual.double(), expected.to(actual.device).double()
        if got.numel() == 0:
            return cls(0.0, 1.0, 0.0, "no elements")
        difference, norm = got - wanted, wanted.norm()
        error = difference.norm()
        # Not cosine_similarity: its epsilon is larger than the products of tiny vectors.
        cosine = (got.flatten() @ wanted.flatten() / (got.norm() * norm)).item()
        if error == 0:
            return cls(0.0, 1.0, 0.0, "equal")
        off = difference.abs() / (1 + wanted.abs())
        place = torch.unravel_index(off.nan_to_num(torch.inf).argmax(), off.shape)
        worst = (
            f"{[int(i) for i in place]}: {got[place].item():.6g}, not {wanted[place].item():.6g}"
        )
        return cls((error / norm).item(), cosine, off.max().item(), worst)

    def faults(self, tolerance: Tolerance) -> list[str]:
        """What is out of bounds, in words; NaN always is."""
        found = []
        if not self.relative <= tolerance.relative:
            found.append(f"relative Frobenius error {self.relative:.2e}")
        if not self.cosine >= tolerance.cosine:
            found.append(f"cosine {self.cosine:.8f}")
        if not self.element <= tolerance.element:
            found.append(f"element off by {self.element:.2e} at {self.worst}")
        return found


def assert_close(
    name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance | None = None
) -> None:
    """Fail with everything that is out of bounds; the bounds default to those of the dtype."""
    if tolerance is None:
        tolerance = TOLERANCES[actual.dtype]
    unfinished = int((~actual.isfinite()).sum())
    assert not unfinished, f"{name}: {unfinished} elements are not finite"
    found = Accuracy.of(actual, expected).faults(tolerance)
    assert not found, f"{name}: " + "; ".join(found)


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Fail with the number of elements whose bits differ; NaN of equal bits is equal."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    size = actual.element_size()
    first, other = (x.contiguous().view(torch.uint8).reshape(-1, size) for x in (actual, expected))
    different = int((first != other.to(first.device)).any(-1).sum())
    assert not different, f"{name}: {different} of {actual.numel()} elements have other bits"
