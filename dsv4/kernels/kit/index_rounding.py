"""Rounding of index queries and keys in registers: rotation, Hadamard transform, FP4, e4m3 codes.

Neighbouring lanes hold a row of 128 channels: four of them 32 each, which is a group of FP4, 16
eight each, or 32 four each. The arithmetic is that of `dsv4.ops.index_keys`, bit for bit: additions
of the transform in the same order, one rounding to bf16 after the rotation and one after the
transform.
"""

from __future__ import annotations

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, cute

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.index_entry import FP4_GROUP, MIN_EXPONENT, MODEL_DIM, TOP_SHIFT
from dsv4.kernels.kit.rms import NEAREST

LANES = 4  # of a row of a query
PAIRS = FP4_GROUP // 2  # registers of a lane
BIAS = 127  # of an exponent
E2M1_MAX = 6.0
E2M1_AMAX_FLOOR = 6 * 2.0**-126


def rotated(pairs: list[Uint32], cos: cute.Tensor, sin: cute.Tensor) -> list[Uint32]:
    """Pairs of neighbouring channels turned, and rounded to bf16."""
    turned = []
    for i, pair in enumerate(pairs):
        even, odd = quant.unpack_bf16(pair)
        turned.append(
            quant.pack_bf16(
                _product(even, cos[i]) - _product(odd, sin[i]),
                _product(even, sin[i]) + _product(odd, cos[i]),
            )
        )
    return turned


def transformed(pairs: list[Uint32], lane: Int32) -> list[Uint32]:
    """The normalised Walsh-Hadamard transform of a row, in natural order, rounded to bf16.

    Neighbouring lanes hold a row, as many channels each as `pairs` has.
    """
    values = [value for pair in pairs for value in quant.unpack_bf16(pair)]
    held, half = len(values), 1
    while half < held:
        for low in range(held):
            if not low & half:
                a, b = values[low], values[low + half]
                values[low], values[low + half] = a + b, a - b
        half *= 2
    for offset in _offsets(1, MODEL_DIM // held):
        is_high = lane & offset != 0
        others = [cute.arch.shuffle_sync_bfly(value, offset=offset) for value in values]
        values = [
            Float32(cutlass.select_(is_high, other - value, value + other))
            for value, other in zip(values, others)
        ]
    factor = Float32(MODEL_DIM**-0.5)
    values = [value * factor for value in values]
    return [quant.pack_bf16(*values[i : i + 2]) for i in range(0, held, 2)]


def coded(pairs: list[Uint32]) -> tuple[cute.Tensor, Float32]:
    """e4m3 codes of a lane's channels, rounded to FP4 with a scale per group, and the scale of the
    row's codes, a power of two."""
    values, exponent = _rounded(pairs)
    held = len(values)
    top = exponent
    for offset in _offsets(FP4_GROUP // held, MODEL_DIM // held):
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
    row = row_exponent(top)
    # A group of zeros may lie further below the row's scale than an exponent reaches.
    shift = cutlass.max(exponent - row, Int32(-BIAS + 1))
    factor = power_of_two(shift + BIAS)
    wide = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        wide[i] = value * factor
    codes = cute.make_rmem_tensor(len(values), Float8E4M3FN)
    codes.store(wide.load().to(Float8E4M3FN))
    return codes, power_of_two(row)


def packed(pairs: list[Uint32]) -> tuple[Uint32, Int32]:
    """e2m1 codes of a lane's channels, at most eight, four bits each from the lowest on, and the
    E8M0 scale of their group."""
    values, exponent = _rounded(pairs)
    codes = Uint32(0)
    for i, value in enumerate(values):
        codes |= _code_e2m1(value) << (4 * i)
    # A value that is rounded to 0 keeps its sign.
    for i, pair in enumerate(pairs):
        codes |= ((pair >> 12) & Uint32(8) | (pair >> 24) & Uint32(0x80)) << (8 * i)
    return codes, exponent


def row_exponent(top: Int32) -> Int32:
    """Biased exponent of the scale of a row of e4m3 codes, by that of its largest group."""
    return cutlass.max(top - TOP_SHIFT, Int32(BIAS + MIN_EXPONENT))


def _rounded(pairs: list[Uint32]) -> tuple[list[Float32], Int32]:
    """A lane's channels rounded to values of e2m1 over the scale of their group, and its biased
    exponent."""
    values = [value for pair in pairs for value in quant.unpack_bf16(pair)]
    amax = quant.amax_bf16(pairs, FP4_GROUP // len(values))
    ratio = cute.arch.fmax(amax, Float32(E2M1_AMAX_FLOOR)) * Float32(1 / E2M1_MAX)
    mantissa = quant.FP32_MANTISSA
    exponent = Int32((ratio.bitcast(Uint32) + ((1 << mantissa) - 1)) >> mantissa)
    exponent = cutlass.min(exponent, 2 * BIAS)
    inverse = power_of_two(2 * BIAS - exponent)
    return [rounded_e2m1(value * inverse) for value in values], exponent


def _code_e2m1(value: Float32) -> Uint32:
    """Code of the magnitude of a value of e2m1, 0 to 7."""
    bits = value.bitcast(Uint32) & Uint32(0x7FFFFFFF)
    # From 1 on codes are an exponent and a bit of the mantissa; below there are 0 and 0.5.
    code = (bits >> (quant.FP32_MANTISSA - 1)) - Uint32(2 * BIAS - 2)
    small = cutlass.select_(bits == 0, Uint32(0), Uint32(1))
    return Uint32(cutlass.select_(bits >= Uint32(BIAS << quant.FP32_MANTISSA), code, small))


def _offsets(first: int, end: int) -> list[int]:
    """Powers of two from `first` on, below `end`."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


def rounded_e2m1(x: Float32) -> Float32:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign of x, ties to the even code."""
    x = cute.arch.fmin(cute.arch.fmax(x, Float32(-E2M1_MAX)), Float32(E2M1_MAX))
    magnitude = cute.arch.fmax(cute.arch.fmax(x, -x), Float32(1.0))
    binade = (magnitude.bitcast(Uint32) & Uint32(0x7F800000)).bitcast(Float32)
    # Its last place is half a binade, the distance of two codes.
    magic = binade * Float32(1.5 * 2**22)
    return (x + magic) - magic


def power_of_two(exponent: Int32) -> Float32:
    """2^(exponent - 127), of 1 to 254."""
    return (exponent << quant.FP32_MANTISSA).bitcast(Float32)


def _product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)
