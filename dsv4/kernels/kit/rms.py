"""Root mean square of a row: correctly rounded, with the bits of the torch implementations, or
fast."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute
from cutlass.cute.math import RoundingMode

NEAREST = RoundingMode.NEAREST_EVEN


def inverse_rms(total: Float32, count: int, eps: float) -> Float32:
    """1 / sqrt(total / count + eps) of a sum of squares."""
    mean = exact_quotient(total, count)
    # Not rsqrt: the GPU has only an approximate one.
    root = cute.math.sqrt(mean + Float32(eps), rounding=NEAREST)
    return cute.math.rcp(root, rounding=NEAREST)


def inverse_rms_approx(total: Float32, count: int, eps: float) -> Float32:
    """1 / sqrt(total / count + eps), off by a few units in the last place; in a tenth of the
    time."""
    mean = cute.math.fma(total, Float32(1 / count), Float32(eps))
    return cute.math.rsqrt(mean, fastmath=True)


def exact_quotient(total: Float32, divisor: int) -> Float32:
    """total / divisor of a total >= 0 or NaN, rounded to nearest even; of totals below 2^-100 and
    divisors that are no powers of two it may miss the last bit."""
    inverse = 1 / divisor
    quotient = total * Float32(inverse)
    if divisor & (divisor - 1) == 0:
        return quotient
    # One step of Newton's, which is exact because the inverse is rounded to nearest (Markstein).
    rest = cute.math.fma(quotient, Float32(-divisor), total)
    corrected = cute.math.fma(rest, Float32(inverse), quotient)
    return cutlass.select_(quotient == Float32.inf, quotient, corrected)
