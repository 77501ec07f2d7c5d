"""Rounding of numbers to codes on a device, bit for bit as `ops.quantized_attention.quantizers`."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.lowp.config import QuantizeKvConfig

INT8_MAX, INT8_FLOOR = 127.0, 1e-7
E4M3_MAX = 448.0


class Int8Scale:
    """Scale of a group of numbers, and their codes.

    Args:
        quantizer: rounding, "triton" or "cuda".
        has_floor: whether Triton's scale is raised, which keeps it from 0.
    """

    def __init__(self, quantizer: str, has_floor: bool):
        self.is_cuda = quantizer == "cuda"
        self.has_floor = has_floor

    def of(self, amax: Float32) -> tuple[Float32, Float32, Float32]:
        """Scale of a group, then what `code` needs of it."""
        if self.is_cuda:
            amax = fmax_nan(amax, Float32(INT8_FLOOR))
            return amax / Float32(INT8_MAX), Float32(1.0), Float32(INT8_MAX) / amax
        scale = amax / Float32(INT8_MAX)
        if self.has_floor:
            return scale + Float32(INT8_FLOOR), *self._divisor(scale + Float32(INT8_FLOOR))
        return scale, *self._divisor(scale)

    def _divisor(self, scale: Float32) -> tuple[Float32, Float32]:
        # 0 / 0 of a group of zeros.
        divisor = cutlass.select_(scale == 0.0, Float32(1.0), Float32(scale))
        return divisor, Float32(1.0) / divisor

    def code(self, x: Float32, divisor: Float32, inverse: Float32) -> Float32:
        """A number whose integer part is the code."""
        if self.is_cuda:
            return round_half_even(x * inverse)
        quotient = divide(x, divisor, inverse, 1 if self.has_floor else 2)
        return quotient + copy_sign(Float32(0.5), quotient)

    def pack(self, codes) -> Uint32:
        """Four codes, the first in the lowest byte."""
        return pack_int8(*codes)


class Fp8Scale:
    """The same for e4m3."""

    def of(self, amax: Float32) -> tuple[Float32, Float32, Float32]:
        """Scale of a group, 1 of zeros; then what `code` needs of it."""
        scale = cutlass.select_(amax == 0.0, Float32(1.0), amax / Float32(E4M3_MAX))
        return scale, scale, Float32(1.0) / scale

    def code(self, x: Float32, divisor: Float32, inverse: Float32) -> Float32:
        """A number that is rounded to the code."""
        return divide(x, divisor, inverse)

    def pack(self, codes) -> Uint32:
        """Four codes, the first in the lowest byte."""
        return pack_e4m3(*codes)


def row_scale(config: QuantizeKvConfig) -> Int8Scale | Fp8Scale:
    """Scales of queries and keys."""
    if config.qk == "fp8":
        return Fp8Scale()
    return Int8Scale(config.quantizer, not config.folds_scale)


def fmax_nan(a: Float32, b: Float32) -> Float32:
    """The larger one; NaN wins."""
    return cute.arch.fmax(a, b, nan=True)


def abs_of(x: Float32) -> Float32:
    """|x|."""
    # Not an operation on bits: the machine takes it with the next comparison.
    return cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def copy_sign(magnitude: Float32, sign: Float32) -> Float32:
    """A magnitude with a sign."""
    bits = sign.bitcast(Uint32) & Uint32(0x80000000)
    return (magnitude.bitcast(Uint32) | bits).bitcast(Float32)


def divide(x: Float32, divisor: Float32, inverse: Float32, steps: int = 2) -> Float32:
    """x / divisor rounded to nearest, by the divisor's rounded inverse: as IEEE has it where
    nothing overflows, in a third of the instructions.

    Args:
        steps: corrections. After one the quotient is a unit in the last place off where it is
            within 2^-22 units of a tie; no x of 8 or 11 bits has such a quotient beside half an
            integer, so that its code is right.
    """
    quotient = x * inverse
    for _ in range(steps):
        rest = cute.math.fma(-quotient, divisor, x)
        quotient = cute.math.fma(rest, inverse, quotient)
    return quotient


def round_half_even(x: Float32) -> Float32:
    """The nearest integer, of two the even one."""
    return cute.arch.inline_ptx(
        "cvt.rni.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def pack_int8(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four int8, the first in the lowest byte: integer parts, saturating."""
    return cute.arch.inline_ptx(
        "{ .reg .s32 a, b, c, d, e; cvt.rzi.s32.f32 a, {$r0}; cvt.rzi.s32.f32 b, {$r1}; "
        "cvt.rzi.s32.f32 c, {$r2}; cvt.rzi.s32.f32 d, {$r3}; "
        "cvt.pack.sat.s8.s32.b32 e, d, c, 0; cvt.pack.sat.s8.s32.b32 {$w0}, b, a, e; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def pack_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four e4m3 codes, the first in the lowest byte; to nearest, ties to even, saturating."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def pack_half(a: Float32, b: Float32) -> Uint32:
    """Two fp16, the first in the low half; to nearest, ties to even."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def unpack_half(word: Uint32) -> tuple[Float32, Float32]:
    """Two fp16 as float32, that of the low half first."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; "
        "cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def across_lanes(operation, x, lanes: int):
    """Reduce over so many neighbouring lanes, a power of two; all get the result."""
    offset = lanes // 2
    while offset:
        x = operation(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
        offset //= 2
    return x
