"""Epilogue of a linear whose outputs are heads: RoPE of their last channels, and sums of squares.

Channels are rows of a warp's accumulators: a lane holds rows lane / 4 + {0, 8} of 16, and of each
two tokens. So the two channels of a pair lie four lanes apart, the 16 channels of a part of a
head's sum in the eight lanes of a column, and neither needs more than its warp.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.plan import UNIT_ROWS
from dsv4.kernels.kit.head_squares import CHANNELS
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.rms import NEAREST

assert CHANNELS == UNIT_ROWS
PAIRS = ROPE_DIM // 2


class HeadOperands(NamedTuple):
    """Tensors of the epilogue of one launch."""

    rope: cute.Tensor  # [R, 64] fp32, cosines, then sines, per position
    positions: cute.Tensor  # [T] int32
    squares: tuple[cute.Tensor, ...]  # [T, H, N] fp32 of each weight, written; or [0, H, N]


class Block(NamedTuple):
    """Place of what a warp holds of an output."""

    row: Int32  # first of 16
    token: Int32  # first of 8
    lane: Int32


class RotateHeads:
    """The device function of a weight's epilogue."""

    def __init__(self, config: HeadRotation):
        self.head_dim = config.head_dim

    @cute.jit
    def apply(
        self, operands: HeadOperands, squares: cute.Tensor, values: cute.Tensor, block: Block, rows
    ):
        """Store the sums of squares of a block, and rotate it in place.

        Args:
            values: fp32 [4] of a lane, rounded as they are stored: row by row, two tokens each.
            rows: of the weight; what lies behind them is no head's.
        """
        head, channel = block.row // self.head_dim, block.row % self.head_dim
        if block.row < rows:
            self._add_squares(squares, values, block, head, channel)
            if channel >= self.head_dim - ROPE_DIM:
                self._rotate(operands, values, block, channel - (self.head_dim - ROPE_DIM))

    @cute.jit
    def _add_squares(self, squares: cute.Tensor, values: cute.Tensor, block: Block, head, channel):
        """Sums over the eight lanes of a column; a lane goes on with one of its two."""
        lane = block.lane
        # The order of additions is that of every tiling, and no compiler's: products of bf16 are
        # exact, those of fp32 are rounded once.
        low, high = (
            cute.math.fma(values[2 + c], values[2 + c], _product(values[c], values[c]))
            for c in range(2)
        )
        is_high = lane & 4 != 0
        total = Float32(cutlass.select_(is_high, high, low))
        total = total + cute.arch.shuffle_sync_bfly(cutlass.select_(is_high, low, high), offset=4)
        for offset in (8, 16):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        token = block.token + lane % 4 * 2 + lane // 4 % 2
        if lane < 8 and token < squares.shape[0]:
            squares[token, head, channel // CHANNELS] = total

    @cute.jit
    def _rotate(self, operands: HeadOperands, values: cute.Tensor, block: Block, channel):
        """Turn the pairs of both tokens of a lane by their positions; products are rounded by
        themselves, as the torch implementation has them.

        Args:
            channel: first of the block among the rotated ones.
        """
        rope, positions, lane = operands.rope, operands.positions, block.lane
        is_even = lane // 4 % 2 == 0
        for c in cutlass.range_constexpr(2):
            token = cutlass.min(block.token + lane % 4 * 2 + c, positions.shape[0] - 1)
            position = cutlass.max(cutlass.min(positions[token], rope.shape[0] - 1), 0)
            for r in cutlass.range_constexpr(2):
                pair = (channel + 8 * r + lane // 4) // 2
                cos, sin = rope[position, pair], rope[position, pair + PAIRS]
                sin = cutlass.select_(is_even, -sin, sin)
                own = values[2 * r + c]
                other = cute.arch.shuffle_sync_bfly(own, offset=4)
                values[2 * r + c] = _product(own, cos) + _product(other, sin)


def _product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)
