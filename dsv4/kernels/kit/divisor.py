"""Divisors that are known at launch: a division by one is a product on the device, where a plain
one takes some 40 instructions."""

import cutlass
from cutlass import Int32, cute


def divisor(value: Int32 | int) -> cute.FastDivmodDivisorV2:
    """Divisor by a number, by 1 in place of 0; host code."""
    return cute.fast_divmod_create_divisor_v2(cutlass.max(Int32(value), 1))
