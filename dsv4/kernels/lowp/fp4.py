"""FP4 blocks on a device: the scale of 16 numbers and their codes, bit for bit as
`ops.quantized_attention.quantizers`.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32

from dsv4.kernels.kit.fp4 import E2M1_MAX, rounded_e4m3
from dsv4.kernels.lowp.rounding import divide

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
