"""Values of configuration fields: what is taken, as what, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import pytest
import torch

from dsv4.kernels.kit.fields import checked_fields


@dataclass(frozen=True)
class Config:
    """A field of every kind."""

    size: int
    factor: float | None = None
    is_causal: bool = False
    dtype: str | None = "bfloat16"
    splits: int | None = None


def test_plain_values_come_out() -> None:
    assert checked_fields(Config, (3,)) == (3,)
    found = checked_fields(Config, (numpy.int64(3), 2, True, None, None))
    assert found == (3, 2.0, True, None, None)
    assert [type(value) for value in found[:2]] == [int, float]
    assert type(checked_fields(Config, (3, numpy.float32(0.5)))[1]) is float


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (("3",), TypeError, "size: got '3', needs an integer"),
        ((None,), TypeError, "size: got None, needs an integer"),
        ((True,), TypeError, "size: got True, needs an integer"),
        ((2.5,), TypeError, r"size: got 2\.5, needs an integer"),
        ((torch.ones(300),), TypeError, "size: got tensor.* [.]{3} .*, needs an integer"),
        ((2**31,), ValueError, "size: got 2147483648, needs at most 2147483647"),
        ((3, 1j), TypeError, "factor: got 1j, needs a real number or None"),
        ((3, False), TypeError, "factor: got False, needs a real number or None"),
        ((3, math.nan), ValueError, "factor: got nan, needs at most 3.4e"),
        ((3, -math.inf), ValueError, "factor: got -inf"),
        ((3, 10**400), ValueError, "factor: got 1000* [.]{3} 0+, needs at most"),
        ((3, None, 1), TypeError, "is_causal: got 1, needs True or False"),
        ((3, None, True, torch.float16), TypeError, "dtype: got torch.float16, needs a string or"),
        ((3, None, True, "x", []), TypeError, r"splits: got \[\], needs an integer or None"),
    ],
)
def test_others_are_refused(values: tuple, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        checked_fields(Config, values)
