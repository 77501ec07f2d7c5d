"""Softmax of a tile of scores in a warpgroup's registers: maxima, weights, their codes.

A thread holds two rows, 8 apart, of 32 columns each, and a quad a row. With a scale of its own for
each thread's columns the largest score is found among integers; from there on a score is
fma(score, factor, -maximum), and weights are 2 to that. What P is relative to is the running
maximum; for FP8 less log2(448), so that the largest code of e4m3 is the largest weight.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import cutlass
from cutlass import Float16, Float32, Int32, Uint32, cute

from dsv4.kernels.attention.softmax import exp2
from dsv4.kernels.kit.reduce import largest, tree
from dsv4.kernels.kit.wgmma import by_row
from dsv4.kernels.lowp.rounding import pack_e4m3, pack_half

# In place of scores of keys that a row does not see: no sum of products is as small.
UNSEEN = {Int32: -(1 << 31), Float32: float("-inf")}
# Before the first score: no score is smaller, and a difference of two of them is 0, not NaN.
LOWEST = -3.4e38
_CHAINS = 4  # of a row's sum


class RowState(NamedTuple):
    """Softmax state of a thread's two rows.

    Attributes:
        top: maximum so far, less the offset.
        total: sum of this thread's weights, relative to it.
        decay: what the sums before the last tile are to be scaled by.
    """

    top: cute.Tensor
    total: cute.Tensor
    decay: cute.Tensor

    @staticmethod
    def make() -> RowState:
        return RowState(*(cute.make_rmem_tensor(2, Float32) for _ in range(3)))

    def reset(self) -> None:
        """Before the first tile."""
        self.top.fill(LOWEST)
        self.total.fill(0.0)


@cute.jit
def hide_unseen(scores: cute.Tensor, limits, lane):
    """Mark the scores of keys from `limits` on, of each of the two rows."""
    rows, dtype = by_row(scores), scores.element_type
    for r in cutlass.range_constexpr(2):
        limit = limits[r] - lane % 4 * 2
        for j in cutlass.range_constexpr(cute.size(rows, mode=[2])):
            for c in cutlass.range_constexpr(2):
                is_seen = 8 * j + c < limit
                rows[r, c, j] = cutlass.select_(is_seen, rows[r, c, j], dtype(UNSEEN[dtype]))


def raise_maxima(
    scores: cute.Tensor, state: RowState, factors, offset: float, is_masked: bool
) -> None:
    """Take a tile's scores into the maxima and decays of its rows, both at a time: each step waits
    for the one before.

    Args:
        factors: on scores, by row and by the part of the columns.
        offset: that maxima are lowered by.
    """
    rows, dtype = by_row(scores), scores.element_type
    parts = len(factors[0])
    columns = cute.size(rows, mode=[2]) // parts
    tops = [[], []]
    for r in range(2):
        for part in range(parts):
            groups = range(part * columns, (part + 1) * columns)
            found = highest([rows[r, c, j] for j in groups for c in range(2)], dtype)
            top = Float32(found) * factors[r][part]
            if is_masked:
                is_unseen = found == UNSEEN[dtype]
                top = cutlass.select_(is_unseen, -Float32.inf, Float32(top))
            tops[r].append(top)
    tops = [tree(cute.arch.fmax, tops[r]) for r in range(2)]
    for distance in (1, 2):
        others = [cute.arch.shuffle_sync_bfly(x, offset=distance) for x in tops]
        tops = [cute.arch.fmax(x, y) for x, y in zip(tops, others)]
    before = [state.top[r] for r in range(2)]
    raised = [cute.arch.fmax(x, y - Float32(offset)) for x, y in zip(before, tops)]
    for r in range(2):
        state.decay[r] = exp2(before[r] - raised[r])
        state.top[r] = raised[r]
        state.total[r] = state.total[r] * state.decay[r]


def weigh(
    scores: cute.Tensor,
    state: RowState,
    factors,
    columns: range,
    is_masked: bool,
) -> None:
    """Turn the scores of some groups of eight columns into weights, in place, and add them up.

    Args:
        factors: on scores, by row and by the part of the columns.
    """
    bits, every = by_row(scores), cute.size(scores) // 4
    unseen, parts = UNSEEN[scores.element_type], len(factors[0])
    weights = by_row(cute.recast_tensor(scores, Float32))
    for r in range(2):
        found = []
        for j in columns:
            for c in range(2):
                score = bits[r, c, j]
                factor = factors[r][j * parts // every]
                weight = exp2(cute.math.fma(Float32(score), factor, -state.top[r]))
                if is_masked:
                    weight = cutlass.select_(score == unseen, Float32(0.0), Float32(weight))
                weights[r, c, j] = weight
                found.append(weight)
        sums = [chain(found[i::_CHAINS]) for i in range(_CHAINS)]
        state.total[r] = state.total[r] + tree(operator.add, sums)


class Weights:
    """Weights of a tile, in blocks of column groups, in place of its scores.

    With the exponentials of some groups go the exponents of the next ones, and sums and codes of
    the ones before, so that no unit waits for another. The assembler would bring all scores to
    exponents first: those of a block take up a weight of the block but one before, times zero.

    Args:
        factors: on scores, by row and by the part of the columns.
        size: column groups of a block.
    """

    def __init__(self, scores: cute.Tensor, factors, codes: cute.Tensor, state: RowState,
                 is_masked: bool, size: int):  # fmt: skip
        self.scores, self.weights = by_row(scores), by_row(cute.recast_tensor(scores, Float32))
        self.codes, self.state, self.factors = codes, state, factors
        self.unseen = UNSEEN[scores.element_type]
        self.is_masked, self.size = is_masked, size
        self.groups = cute.size(scores) // 4
        self.sums: list[list] = [[None] * _CHAINS for _ in range(2)]
        self.lowered = [-state.top[r] for r in range(2)]
        self.find_exponents(0)

    @property
    def blocks(self) -> range:
        """Numbers of the blocks."""
        return range(self.groups // self.size)

    def elements(self, block: int):
        """Row, column and group of a block's elements."""
        groups = range(block * self.size, (block + 1) * self.size)
        return [(r, c, j) for j in groups for r in range(2) for c in range(2)]

    def find_exponents(self, block: int) -> None:
        """Scores to exponents."""
        for r, c, j in self.elements(block):
            score, parts = self.scores[r, c, j], len(self.factors[0])
            factor = self.factors[r][j * parts // self.groups]
            found = cute.math.fma(Float32(score), factor, self.lowered[r])
            if self.is_masked:
                found = cutlass.select_(score == self.unseen, -Float32.inf, Float32(found))
            self.weights[r, c, j] = found

    def compute(self, block: int) -> None:
        """Weights of a block, behind everything before."""
        for r, c, j in self.elements(block):
            self.weights[r, c, j] = exp2(self.weights[r, c, j])
        if block + 1 < len(self.blocks):
            if block > 0:
                self.lowered = [
                    cute.math.fma(x, Float32(0.0), y)
                    for x, y in zip(self.ends(block - 1), self.lowered)
                ]
            self.find_exponents(block + 1)
        if block > 0:
            self.take(block - 1)

    def take(self, block: int) -> None:
        """Sums and codes of a block's weights."""
        for r, c, j in self.elements(block):
            chain = (2 * j + c) % _CHAINS
            before, weight = self.sums[r][chain], self.weights[r, c, j]
            self.sums[r][chain] = weight if before is None else before + weight
        for pair in range(block * self.size // 2, (block + 1) * self.size // 2):
            encode_pair(self.weights, self.codes, pair)

    def ends(self, block: int) -> list[Float32]:
        """The last values of each row of a block."""
        return [self.weights[r, 1, (block + 1) * self.size - 1] for r in range(2)]

    def finish(self) -> None:
        """The last block's sums and codes, and the rows' sums."""
        self.take(self.blocks[-1])
        for r in range(2):
            self.state.total[r] = self.state.total[r] + tree(operator.add, self.sums[r])


def highest(scores, dtype):
    """The largest of some scores."""
    return largest(scores) if dtype is Int32 else tree(cute.arch.fmax, scores)


def chain(values):
    """Sum of values, one after the other."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@cute.jit
def encode(scores: cute.Tensor, codes: cute.Tensor):
    """Codes of weights as the operand of the next product."""
    weights = by_row(cute.recast_tensor(scores, Float32))
    for pair in cutlass.range_constexpr(cute.size(weights, mode=[2]) // 2):
        encode_pair(weights, codes, pair)


def encode_pair(weights: cute.Tensor, codes: cute.Tensor, pair: int) -> None:
    """Codes of the weights of two column groups as the operand of the next product.

    A thread's weights of 16 keys become four neighbouring bytes for each row: the order of keys
    that `groups.V_ORDER` gives FP8 values. In fp16 they stay where they are.
    """
    words = cute.recast_tensor(codes, Uint32)
    for r in range(2):
        if codes.element_type is Float16:
            for j in range(2):
                two = [weights[r, c, 2 * pair + j] for c in range(2)]
                words[4 * pair + 2 * j + r] = pack_half(*two)
        else:
            four = [weights[r, c, 2 * pair + j] for j in range(2) for c in range(2)]
            words[2 * pair + r] = pack_e4m3(*four)
