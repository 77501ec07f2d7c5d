"""Epilogue of a linear whose outputs are heads: RoPE of their last channels, and sums of squares.

A thread has a channel of some tokens: the two channels of a pair lie in neighbouring lanes, the 16
channels of a part of a head's sum in half a warp, and neither needs more than its warp.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.operands import HeadOperands
from dsv4.kernels.kit.head_squares import CHANNELS
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.reduce import spread_sums
from dsv4.kernels.kit.rms import NEAREST

PAIRS = ROPE_DIM // 2
WARP = 32

assert 2 * CHANNELS == WARP and ROPE_DIM % WARP == 0


class RotateHeads:
    """The device functions of the epilogue."""

    def __init__(self, config: HeadRotation):
        self.head_dim = config.head_dim

    @cute.jit
    def apply(
        self, heads: HeadOperands, weight: cutlass.Constexpr, values: cute.Tensor, row, first_token,
        rows, tokens,
    ):  # fmt: skip
        """Store the sums of squares of a warp's 32 channels, and rotate them in place.

        Args:
            weight: index, of whose heads they are.
            values: fp32 of the thread's channel, rounded as they are stored, of tokens from
                `first_token` on.
            row: the warp's first channel among the `rows` of the weight; those behind are no
                head's.
        """
        lane = cute.arch.lane_idx()
        self._add_squares(heads.squares[weight], values, row, first_token, rows, lane)
        channel = row % self.head_dim - (self.head_dim - ROPE_DIM)
        if channel >= 0:
            rope, pair = heads.rope, (channel + lane) // 2
            for i in cutlass.range_constexpr(cute.size(values)):
                token = cutlass.min(first_token + i, tokens - 1)
                last = Int32(rope.shape[0]) - 1
                place = cutlass.max(cutlass.min(heads.positions[token], last), Int32(0))
                values[i] = _turned(values[i], rope[place, pair], rope[place, pair + PAIRS], lane)

    @cute.jit
    def _add_squares(self, squares: cute.Tensor, values, row, first_token, rows, lane):
        """Sums of 16 lanes, channels eight apart first: an order that no tiling changes."""
        terms = []
        for i in cutlass.range_constexpr(cute.size(values)):
            other = cute.arch.shuffle_sync_bfly(values[i], offset=CHANNELS // 2)
            is_high = lane & (CHANNELS // 2) != 0
            low = Float32(cutlass.select_(is_high, other, values[i]))
            high = Float32(cutlass.select_(is_high, values[i], other))
            # Squares of bf16 are exact; of fp32 it is said which one is rounded.
            terms.append(cute.math.fma(high, high, _product(low, low)))
        first, sums, copies = spread_sums(terms, lane, (4, 2, 1))
        own = row + lane // CHANNELS * CHANNELS
        head, part = own // self.head_dim, own % self.head_dim // CHANNELS
        if own < rows and lane & (CHANNELS // 2) == 0 and lane % copies == 0:
            for i in cutlass.range_constexpr(len(sums)):
                token = first_token + first + i
                if token < squares.shape[0] and first + i < cute.size(values):
                    squares[token, head, part] = sums[i]


def _turned(value: Float32, cos: Float32, sin: Float32, lane) -> Float32:
    """A lane's channel of a pair, turned; products are rounded by themselves, as the torch
    implementation has them."""
    other = cute.arch.shuffle_sync_bfly(value, offset=1)
    even = _product(value, cos) - _product(other, sin)
    odd = _product(other, sin) + _product(value, cos)
    return Float32(cutlass.select_(lane % 2 == 0, even, odd))


def _product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)
