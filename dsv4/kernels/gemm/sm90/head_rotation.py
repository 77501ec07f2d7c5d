"""Epilogue of a linear whose outputs are heads: RoPE of their last channels, and sums of squares.

Channels are rows of a warp's accumulators: a lane holds rows lane / 4 + {0, 8} of 16, and of each
two of every 8 tokens. So the two channels of a pair lie four lanes apart, the 16 channels of a part
of a head's sum in the eight lanes of a column, and neither needs more than its warp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.operands import HeadOperands, chosen, table_row
from dsv4.kernels.gemm.plan import LANE_VALUES, UNIT_ROWS
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.head_squares import CHANNELS
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.reduce import spread_sums
from dsv4.kernels.kit.rms import NEAREST
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES
from dsv4.kernels.kit.vectors import address_of, vector_at

assert CHANNELS == UNIT_ROWS
PAIRS = ROPE_DIM // 2
VECTOR = VECTOR_BYTES // 2  # channels
TURNS = 4  # cosine and sine of a lane's two rows
WARP = 32


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


@dataclass(frozen=True)
class StagedShare:
    """Share of a thread in a warpgroup's rows in shared memory."""

    row: Int32  # first of 64
    first_token: Int32  # of the token tile
    thread: Int32  # of the warpgroup
    threads: int  # of a token

    @property
    def token(self) -> Int32:
        return self.thread // self.threads

    @property
    def vectors(self) -> int:
        """Vectors of 8 channels."""
        return ROPE_DIM // VECTOR // self.threads

    @property
    def first_vector(self) -> Int32:
        return self.thread % self.threads * self.vectors

    def vector(self, span: cute.Pointer, v: int) -> cute.Tensor:
        """The four words of a vector."""
        place = (self.first_vector + v) ^ (self.token % 8)
        offset = (self.token * (SPAN_BYTES // VECTOR_BYTES) + place) * VECTOR
        start = cute.recast_ptr(span + cute.assume(offset, divby=VECTOR), dtype=Uint32)
        return cute.make_tensor(start, cute.make_layout(VECTOR // 2))


class RotateHeads:
    """The device functions of a weight's epilogue."""

    def __init__(self, config: HeadRotation):
        self.head_dim = config.head_dim

    def rotated_channel(self, row) -> Int32:
        """Of a block the first channel among the rotated ones; negative: it is before them."""
        return row % self.head_dim - (self.head_dim - ROPE_DIM)

    @cute.jit
    def load_turns(
        self, operands: HeadOperands, positions: cute.Tensor, block: Block, turns: cute.Tensor
    ):
        """Cosines and sines of the pairs that a lane rotates, [row, cosine or sine, group], where a
        block is rotated.

        Args:
            positions: of token 32 i + lane of the token tile.
        """
        channel = self.rotated_channel(block.row)
        if channel >= 0:
            for n in cutlass.range_constexpr(cute.size(turns) // TURNS):
                position = position_of(positions, (block.group + n) * 8, block.own_token)
                place = table_row(operands.rope, position)
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
                terms.append(_square_sum(low, high))
        first, sums, copies = spread_sums(terms, lane, (16, 8, 4))
        head, part = block.row // self.head_dim, block.row % self.head_dim // CHANNELS
        if block.row < rows and lane // 4 % copies == 0:
            for i in cutlass.range_constexpr(len(sums)):
                term = first + i
                token = block.first_token + block.group * 8
                token += term // 2 * 8 + lane % 4 * 2 + term % 2
                if token < squares.shape[0]:
                    squares[token, head, part] = sums[i]

    def is_rotated(self, share: StagedShare):
        """Whether the 64 rows are those that are rotated."""
        return share.row % self.head_dim == self.head_dim - ROPE_DIM

    @cute.jit
    def load_staged_turns(
        self, operands: HeadOperands, share: StagedShare, position, turns: cute.Tensor
    ):
        """Cosines and sines of a thread's channels, [cosine or sine, vector, pair], where they are
        rotated."""
        if self.is_rotated(share):
            rope = operands.rope
            row = Int64(table_row(rope, position)) * rope.stride[0]
            pairs = share.vectors * (VECTOR // 2)
            for part in cutlass.range_constexpr(2):
                first = row + part * PAIRS + share.first_vector * (VECTOR // 2)
                source = vector_at(address_of(rope, first), Float32, 0, pairs)
                target = cute.make_tensor(turns.iterator + part * pairs, cute.make_layout(pairs))
                cute.autovec_copy(source, target)

    @cute.jit
    def apply_staged(
        self, squares: cute.Tensor, span: cute.Pointer, share: StagedShare, turns: cute.Tensor,
        y: cute.Tensor,
    ):  # fmt: skip
        """The same as `apply`, to a thread's channels of a token in shared memory.

        Args:
            span: bf16 [token, 64 rows], vectors swizzled.
            turns: of `load_staged_turns`.
            y: the output, whose sizes say what there is.
        """
        token, count = share.first_token + share.token, share.vectors
        if token < y.shape[0] and share.row < y.shape[1]:
            words = cute.make_rmem_tensor((VECTOR // 2, count), Uint32)
            for v in cutlass.range_constexpr(count):
                cute.autovec_copy(share.vector(span, v), words[None, v])
            self._add_staged_squares(squares, words, share, token)
            if self.is_rotated(share):
                for v in cutlass.range_constexpr(count):
                    for i in cutlass.range_constexpr(VECTOR // 2):
                        pair = v * (VECTOR // 2) + i
                        cos, sin = turns[pair], turns[count * (VECTOR // 2) + pair]
                        words[i, v] = _turned(words[i, v], cos, sin)
                    cute.autovec_copy(words[None, v], share.vector(span, v))

    @cute.jit
    def _add_staged_squares(self, squares: cute.Tensor, words: cute.Tensor, share, token):
        """Sums of a thread's channels, in the order of `_add_squares`: halves of 16."""
        count = share.vectors * VECTOR // CHANNELS
        sums = cute.make_rmem_tensor(count, Float32)
        for i in cutlass.range_constexpr(count):
            sums[i] = _sum_of_squares([words[w, 2 * i + v] for v in range(2) for w in range(4)])
        head, channel = share.row // self.head_dim, share.row % self.head_dim
        part = (channel + share.first_vector * VECTOR) // CHANNELS
        if token < squares.shape[0]:
            offset = Int64(token) * squares.stride[0] + head * squares.stride[1] + part
            target = vector_at(address_of(squares, offset), Float32, 0, count)
            cute.autovec_copy(sums, target)

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


def _sum_of_squares(pairs: list) -> Float32:
    """Of the channels of a part, as pairs of bf16: added in halves, as lanes add theirs."""
    values = [value for pair in pairs for value in quant.unpack_bf16(pair)]
    half = len(values) // 2
    terms = [_square_sum(a, b) for a, b in zip(values[:half], values[half:])]
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:])]
    return terms[0]


def _square_sum(low: Float32, high: Float32) -> Float32:
    """Of channels 8 apart. Squares of bf16 are exact; of fp32 it is said which one is rounded."""
    return cute.math.fma(high, high, _product(low, low))


def _turned(pair: Uint32, cos: Float32, sin: Float32) -> Uint32:
    """A pair of bf16, turned."""
    even, odd = quant.unpack_bf16(pair)
    return quant.pack_bf16(
        _product(even, cos) - _product(odd, sin), _product(even, sin) + _product(odd, cos)
    )


def position_of(positions: cute.Tensor, first: Int32 | int, token) -> Int32:
    """That of a token `token` behind the `first`, of positions of token 32 i + lane; lanes agree on
    the 32."""
    words = [positions[i] for i in range(cute.size(positions))]
    word = words[first // WARP] if isinstance(first, int) else chosen(words, first // WARP)
    return cute.arch.shuffle_sync(word, first % WARP + token)


def _swap(condition, a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """(a, b) under a condition, else (b, a)."""
    select = cutlass.select_
    return Float32(select(condition, a, b)), Float32(select(condition, b, a))


def _product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)
