"""The accumulator of Hopper's FP8 tensor core, as bits; goldens of an H200 say that it is so.

One instruction adds the products of its 32 columns and the accumulator as integers: all are shifted
to the largest exponent among them, and what lies more than 13 bits below is cut off. A float32
accumulator keeps 13 bits behind the point, the rest is cut off as well; a float16 one is the
rounded sum.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.arithmetic.numerics import f32

FRACTION_BITS = 13
_LEAST_EXPONENT = {"e4m3": -6, "e5m2": -14}
_NONE = -1000  # exponent of a zero: no sum is aligned to it


def _exponents(values: np.ndarray, least: int) -> np.ndarray:
    """int32 exponents of finite numbers, subnormal ones of a format at its `least`."""
    exponents = np.maximum(np.frexp(values)[1] - 1, least)
    return np.where(values == 0, _NONE, exponents).astype(np.int32)


def fp8_sum(
    a: np.ndarray, b: np.ndarray, kinds: tuple[str, str], before: np.ndarray, *, keep_all: bool
) -> np.ndarray:
    """The accumulator after one product.

    Args:
        a, b: float32 [M, K], [N, K], the values of FP8 codes.
        kinds: their formats, "e4m3" or "e5m2".
        before: float32 [M, N], the accumulator.
        keep_all: give the whole sum, to be rounded to float16; else cut it to 13 bits.

    Returns: float32 [M, N]. Infinities and NaN are those of the plain sum.
    """
    exponents_a, exponents_b = (
        _exponents(x, _LEAST_EXPONENT[kind]).T for x, kind in zip((a, b), kinds)
    )
    top = _exponents(before, -126)
    for of_a, of_b in zip(exponents_a, exponents_b):
        np.maximum(top, of_a[:, None] + of_b, out=top)
    scale = np.where(top <= _NONE, 0, FRACTION_BITS - top)
    total = np.trunc(np.ldexp(before, scale))
    for column_a, column_b in zip(a.T, b.T):
        total += np.trunc(np.ldexp(column_a[:, None] * column_b, scale))
    if not keep_all:
        total = _cut(total)
    out = np.ldexp(total, -scale) + f32(0)  # no negative zero
    plain = a @ b.T + before
    return np.where(np.isfinite(plain), out, plain)


def _cut(total: np.ndarray) -> np.ndarray:
    """Integers without the bits below the leading one and 13 more."""
    excess = np.maximum(np.frexp(total)[1] - 1 - FRACTION_BITS, 0)
    return np.ldexp(np.trunc(np.ldexp(total, -excess)), excess)
