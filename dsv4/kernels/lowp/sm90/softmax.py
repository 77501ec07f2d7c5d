"""Softmax of a tile of scores in a warpgroup's registers: maxima, weights, their codes.

A thread holds two rows, 8 apart, of 32 columns each, and a quad a row. With a scale of its own for
each thread's columns the largest score is found among integers; from there on a score is
fma(score, factor, -maximum), and weights are 2 to that. What P is relative to is the running
maximum less log2(448), so that the largest code of e4m3 is the largest weight.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from dsv4.kernels.attention.softmax import exp2
from dsv4.kernels.kit.reduce import largest, tree
from dsv4.kernels.kit.wgmma import by_row
from dsv4.kernels.lowp.config import P_OFFSET
from dsv4.kernels.lowp.rounding import pack_e4m3

# In place of scores of keys that a row does not see: no sum of products is as small.
UNSEEN = -(1 << 31)
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
    rows = by_row(scores)
    for r in cutlass.range_constexpr(2):
        limit = limits[r] - lane % 4 * 2
        for j in cutlass.range_constexpr(cute.size(rows, mode=[2])):
            for c in cutlass.range_constexpr(2):
                is_seen = 8 * j + c < limit
                rows[r, c, j] = cutlass.select_(is_seen, rows[r, c, j], Int32(UNSEEN))


def raise_maxima(scores: cute.Tensor, state: RowState, factor: Float32, is_masked: bool) -> None:
    """Take a tile's scores into the maxima and decays of its rows, both at a time: each step waits
    for the one before."""
    rows = by_row(scores)
    columns = [(c, j) for j in range(cute.size(rows, mode=[2])) for c in range(2)]
    found = [largest([rows[r, c, j] for c, j in columns]) for r in range(2)]
    tops = [Float32(x) * factor for x in found]
    if is_masked:
        lowest = -Float32.inf
        tops = [cutlass.select_(x == UNSEEN, lowest, Float32(t)) for x, t in zip(found, tops)]
    for offset in (1, 2):
        others = [cute.arch.shuffle_sync_bfly(x, offset=offset) for x in tops]
        tops = [cute.arch.fmax(x, y) for x, y in zip(tops, others)]
    before = [state.top[r] for r in range(2)]
    raised = [cute.arch.fmax(x, y - Float32(P_OFFSET["fp8"])) for x, y in zip(before, tops)]
    for r in range(2):
        state.decay[r] = exp2(before[r] - raised[r])
        state.top[r] = raised[r]
        state.total[r] = state.total[r] * state.decay[r]


def weigh(
    scores: cute.Tensor, state: RowState, factor: Float32, columns: range, is_masked: bool
) -> None:
    """Turn the scores of some groups of eight columns into weights, in place, and add them up."""
    bits = by_row(scores)
    weights = by_row(cute.recast_tensor(scores, Float32))
    for r in range(2):
        found = []
        for j in columns:
            for c in range(2):
                score = bits[r, c, j]
                weight = exp2(cute.math.fma(Float32(score), factor, -state.top[r]))
                if is_masked:
                    weight = cutlass.select_(score == UNSEEN, Float32(0.0), Float32(weight))
                weights[r, c, j] = weight
                found.append(weight)
        sums = [chain(found[i::_CHAINS]) for i in range(_CHAINS)]
        state.total[r] = state.total[r] + tree(operator.add, sums)


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
    that `groups.V_ORDER` gives the values.
    """
    weights = by_row(cute.recast_tensor(scores, Float32))
    words = cute.recast_tensor(codes, Uint32)
    for i in cutlass.range_constexpr(cute.size(weights, mode=[2]) // 2):
        for r in cutlass.range_constexpr(2):
            four = [weights[r, c, 2 * i + j] for j in range(2) for c in range(2)]
            words[2 * i + r] = pack_e4m3(*four)
