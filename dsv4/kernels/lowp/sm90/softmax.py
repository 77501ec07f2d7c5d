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
    """Codes of weights as the operand of the next product.

    A thread's weights of 16 keys become four neighbouring bytes for each row: the order of keys
    that `groups.V_ORDER` gives FP8 values. In fp16 they stay where they are.
    """
    weights = by_row(cute.recast_tensor(scores, Float32))
    words = cute.recast_tensor(codes, Uint32)
    is_half = codes.element_type is Float16
    for i in cutlass.range_constexpr(cute.size(weights, mode=[2]) // 2):
        for r in cutlass.range_constexpr(2):
            if cutlass.const_expr(is_half):
                for j in cutlass.range_constexpr(2):
                    two = [weights[r, c, 2 * i + j] for c in range(2)]
                    words[4 * i + 2 * j + r] = pack_half(*two)
            else:
                four = [weights[r, c, 2 * i + j] for j in range(2) for c in range(2)]
                words[2 * i + r] = pack_e4m3(*four)
