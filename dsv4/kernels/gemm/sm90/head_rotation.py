"""Epilogue of a linear whose outputs are heads: RoPE of their last channels, and sums of squares.

Channels are rows of a warp's accumulators: a lane holds rows lane / 4 + {0, 8} of 16, and of each
two of every 8 tokens. So the two channels of a pair lie four lanes apart, the 16 channels of a part
of a head's sum in the eight lanes of a column, and neither needs more than its warp.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.plan import LANE_VALUES, UNIT_ROWS
from dsv4.kernels.gemm.sm90.context import chosen
from dsv4.kernels.kit.head_squares import CHANNELS
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.reduce import spread_sums
from dsv4.kernels.kit.rms import NEAREST

assert CHANNELS == UNIT_ROWS
PAIRS = ROPE_DIM // 2
TURNS = 4  # cosine and sine of a lane's two rows
WARP = 32


class HeadOperands(NamedTuple):
    """Tensors of the epilogues of one launch."""

    rope: cute.Tensor  # [R, 64] fp32, cosines, then sines, per position
    positions: cute.Tensor  # [T] int32
    squares: tuple[cute.Tensor, ...]  # [T, H, N] fp32 of each weight, written; or [0, H, N]


class Block(NamedTuple):
    """Place of what a warp holds of an output: 16 rows of a weight, and groups of 8 tokens."""

    row: Int32  # first of 16
    first_token: Int32  # of the token tile
    group: Int32 | int  # first of the token tile's
    lane: Int32

    @property
    def is_odd(self):
        """Whether the lane has the second channels of pairs."""
        return self.lane // 4 % 2 == 1

    @property
    def own_token(self) -> Int32:
        """Of a group's tokens the one that a lane rotates, for itself and the lane four away."""
        return self.lane % 4 * 2 + self.lane // 4 % 2


class RotateHeads:
    """The device functions of a weight's epilogue."""

    def __init__(self, config: HeadRotation):
        self.head_dim = config.head_dim

    def rotated_channel(self, row) -> Int32:
        """Of a block the first channel among the rotated ones; negative: it is before them."""
        return row % self.head_dim - (self.head_dim - ROPE_DIM)

    @cute.jit
    def load_turns(
        self, operands: HeadOperands, places: cute.Tensor, block: Block, turns: cute.Tensor
    ):
        """Cosines and sines of the pairs that a lane rotates, [row, cosine or sine, group], where a
        block is rotated.

        Args:
            places: rows of the table, of token 32 i + lane of the token tile.
        """
        channel = self.rotated_channel(block.row)
        if channel >= 0:
            for n in cutlass.range_constexpr(cute.size(turns) // TURNS):
                place = _place(places, (block.group + n) * 8, block.own_token)
                for r in cutlass.range_constexpr(2):
                    pair = (channel + 8 * r + block.lane // 4) // 2
                    turns[TURNS * n + 2 * r] = operands.rope[place, pair]
                    turns[TURNS * n + 2 * r + 1] = operands.rope[place, pair + PAIRS]

    @cute.jit
    def apply(
        self, squares: cute.Tensor, values: cute.Tensor, turns: cute.Tensor, block: Block, rows
    ):
        """Store the sums of squares of a block, and rotate it in place.

        Args:
            values: fp32, rounded as they are stored: [row, token, group] of a lane.
            turns: of `load_turns`.
            rows: of the weight; what lies behind them is no head's.
        """
        self._add_squares(squares, values, block, rows)
        if self.rotated_channel(block.row) >= 0:
            for n in cutlass.range_constexpr(cute.size(values) // LANE_VALUES):
                for r in cutlass.range_constexpr(2):
                    self._rotate(values, turns, block, n, r)

    @cute.jit
    def _add_squares(self, squares: cute.Tensor, values: cute.Tensor, block: Block, rows):
        """Sums over the eight lanes of a column, each lane's two rows first: an order that no
        tiling changes."""
        lane, terms = block.lane, []
        for n in cutlass.range_constexpr(cute.size(values) // LANE_VALUES):
            for c in cutlass.range_constexpr(2):
                low, high = values[LANE_VALUES * n + c], values[LANE_VALUES * n + 2 + c]
                # Squares of bf16 are exact; of fp32 it is said which one is rounded.
                terms.append(cute.math.fma(high, high, _product(low, low)))
        first, sums, copies = spread_sums(terms, lane, (16, 8, 4))
        head, part = block.row // self.head_dim, block.row % self.head_dim // CHANNELS
        if block.row < rows and lane // 4 % copies == 0:
            for i in cutlass.range_constexpr(len(sums)):
                term = first + i
                token = block.first_token + block.group * 8
                token += term // 2 * 8 + lane % 4 * 2 + term % 2
                if token < squares.shape[0]:
                    squares[token, head, part] = sums[i]

    def _rotate(self, values: cute.Tensor, turns: cute.Tensor, block: Block, n: int, r: int):
        """Turn the pairs of a row of two tokens. A lane turns those of one, and the lane four away,
        which has the other channels, those of the other one: they exchange what they have before,
        and what they get after.

        Products are rounded by themselves, as the torch implementation has them.
        """
        cos, sin = turns[TURNS * n + 2 * r], turns[TURNS * n + 2 * r + 1]
        i, is_odd = LANE_VALUES * n + 2 * r, block.is_odd
        own, other = _swap(is_odd, values[i + 1], values[i])
        other = cute.arch.shuffle_sync_bfly(other, offset=4)
        odd, even = _swap(is_odd, own, other)
        turned_even = _product(even, cos) - _product(odd, sin)
        turned_odd = _product(even, sin) + _product(odd, cos)
        own, other = _swap(is_odd, turned_odd, turned_even)
        other = cute.arch.shuffle_sync_bfly(other, offset=4)
        values[i + 1], values[i] = _swap(is_odd, own, other)


def _place(places: cute.Tensor, first: Int32 | int, token) -> Int32:
    """Row of the table of a token of the eight from `first` on."""
    words = [places[i] for i in range(cute.size(places))]
    word = words[first // WARP] if isinstance(first, int) else chosen(words, first // WARP)
    return cute.arch.shuffle_sync(word, first % WARP + token)


def _swap(condition, a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """(a, b) under a condition, else (b, a)."""
    select = cutlass.select_
    return Float32(select(condition, a, b)), Float32(select(condition, b, a))


def _product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)
