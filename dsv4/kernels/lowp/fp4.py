"""FP4 blocks on a device: the scale of 16 numbers and their codes, bit for bit as
`ops.quantized_attention.quantizers`.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.lowp.rounding import divide

E2M1_MAX = 6.0
LANES, TOGETHER = 32, 4  # rows whose words of scales are a column; columns that lie side by side


def block_scale(amax: Float32) -> tuple[Float32, Float32]:
    """Scale of a block before it is rounded to e4m3, and what numbers are multiplied by to become
    codes: the inverse of the rounded one, 0 of zeros."""
    unrounded = divide(amax, Float32(E2M1_MAX), Float32(1 / E2M1_MAX))
    scale = rounded_e4m3(unrounded)
    is_zero = scale == 0.0
    inverse = Float32(1.0) / cutlass.select_(is_zero, Float32(1.0), scale)
    return unrounded, cutlass.select_(is_zero, Float32(0.0), inverse)


def scale_place(row, word, rows: int, words: int):
    """Place of a row's word of scales, of those of a tile's rows: in words, as
    `ops.quantized_attention.quantizers.in_scale_order` has it.

    Args:
        row, word: of the scale: of its row the word's number.
        rows, words: of a tile, and of a row of it.
    """
    column = word * (rows // LANES) + row // LANES
    together = min(TOGETHER, rows // LANES * words)
    return (column // together * LANES + row % LANES) * together + column % together


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
