"""NVFP4 on a device: e2m1 codes, and the e4m3 scale of 16 numbers in units of an fp32 one.

`block_scale` is the arithmetic of `dsv4.ops.quantize.quantize_nvfp4`, bit for bit.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

E2M1_MAX = 6.0
_INFINITE = 0x7F800000
_NAN = 0x7FC00000


def block_scale(amax: Float32, per_whole: Float32, whole: Float32) -> tuple[Int32, Float32]:
    """e4m3 byte of a block, NaN where it is not finite; and what its numbers are multiplied by to
    become codes, 0 where the scale has become 0.

    Args:
        amax: largest magnitude of the block.
        per_whole: of `per_whole`.
        whole: the fp32 scale.
    """
    ratio = (amax * per_whole).bitcast(Int32)
    # An infinity would be rounded to the largest scale.
    ratio = cutlass.select_(amax.bitcast(Int32) >= _INFINITE, Int32(_NAN), ratio)
    byte, scale = e4m3_code(Int32(ratio).bitcast(Float32))
    step = scale * whole
    is_zero = step == 0.0
    inverse = Float32(1.0) / cutlass.select_(is_zero, Float32(1.0), step)
    return byte, cutlass.select_(is_zero, Float32(0.0), inverse)


def per_whole(whole: Float32) -> Float32:
    """What largest magnitudes are multiplied by to become scales in units of `whole`."""
    return Float32(1.0) / (Float32(E2M1_MAX) * whole)


def e4m3_code(x: Float32) -> tuple[Int32, Float32]:
    """Byte of the nearest e4m3, ties to even, saturating, and its value."""
    byte, value = cute.arch.inline_ptx(
        "{ .reg .b16 c, low, high; .reg .b32 d; .reg .f32 z; mov.f32 z, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 c, z, {$r0}; cvt.rn.f16x2.e4m3x2 d, c; "
        "mov.b32 {low, high}, d; cvt.f32.f16 {$w1}, low; cvt.u32.u16 {$w0}, c; }",
        write_only_types=[Int32, Float32],
        read_only_args=[x],
    )
    return byte, value


def rounded_e4m3(x: Float32) -> Float32:
    """The nearest e4m3, ties to even, saturating."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 c, low, high; .reg .b32 d; .reg .f32 z; mov.f32 z, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 c, z, {$r0}; cvt.rn.f16x2.e4m3x2 d, c; "
        "mov.b32 {low, high}, d; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def pack_e2m1(codes) -> Uint32:
    """Eight e2m1 codes, the first in the lowest four bits; to nearest, ties to even, saturating."""
    pairs = "; ".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}}" for i in range(4)
    )
    return cute.arch.inline_ptx(
        f"{{ .reg .b8 b0, b1, b2, b3; {pairs}; mov.b32 {{$w0}}, {{b0, b1, b2, b3}}; }}",
        write_only_types=[Uint32],
        read_only_args=list(codes),
    )


def pack_e2m1_pair(low: Float32, high: Float32) -> Uint32:
    """Two e2m1 codes in the lowest byte, likewise."""
    return cute.arch.inline_ptx(
        "{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, {$r1}, {$r0}; mov.b32 {$w0}, {b, b, b, b}; }",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )
