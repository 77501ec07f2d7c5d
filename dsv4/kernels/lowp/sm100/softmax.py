"""Softmax of a tile of scores, a row a thread: maximum, weights, their codes.

A score is fma(product, factor, -maximum), with a factor for each part of a tile's keys that share a
scale; weights are 2 to that. Maxima are found among products, integers or floats. What weights are
relative to is the running maximum less log2(448), so that the largest code of e4m3 is the largest
weight. Two columns are computed at a time.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from dsv4.kernels.attention.softmax import exp2_in_branch
from dsv4.kernels.kit.reduce import largest, tree
from dsv4.kernels.lowp.groups import V_ORDER
from dsv4.kernels.lowp.plan import TILE_KEYS
from dsv4.kernels.lowp.rounding import pack_e4m3, pack_half

# In place of products of keys that a row does not see: no sum of products is as small.
UNSEEN = {Int32: -(1 << 31), Float32: float("-inf")}
# Before the first score: no score is smaller, and a difference of two of them is 0, not NaN.
LOWEST = -3.4e38
# In place of a factor of 0, whose products are 0, too: times -inf it would make a NaN.
SMALLEST_FACTOR = 1e-37
CHUNK = 32  # columns that are computed one after the other
_CHAINS = 4  # of a row's sum


class RowState(NamedTuple):
    """Softmax state of a row.

    Attributes:
        top: maximum so far, less the offset.
        total: sum of the weights, relative to it.
    """

    top: cute.Tensor
    total: cute.Tensor

    @staticmethod
    def make() -> RowState:
        return RowState(*(cute.make_rmem_tensor(1, Float32) for _ in range(2)))

    def reset(self) -> None:
        """Before the first tile."""
        self.top[0] = Float32(LOWEST)
        self.total[0] = Float32(0.0)


def part_of(column: int, parts: int) -> int:
    """Part of a tile's keys whose scale a column has: of four they take turns in pairs, of two
    they are halves of 128."""
    return column % 8 // 2 if parts == 4 else column * parts // TILE_KEYS


@cute.jit
def hide_unseen(products: cute.Tensor, limit):
    """Mark the products of keys from `limit` on."""
    dtype = products.element_type
    for first in cutlass.range_constexpr(0, cute.size(products), CHUNK):
        for i in cutlass.range_constexpr(first, first + CHUNK):
            products[i] = cutlass.select_(i < limit, products[i], dtype(UNSEEN[dtype]))


def raised_top(products: cute.Tensor, state: RowState, factors, offset: float) -> Float32:
    """What the weights of a tile, and sums from then on, are relative to.

    Args:
        factors: on products, by the part of the tile's keys.
    """
    parts, dtype, tops = len(factors), products.element_type, []
    for part in range(parts):
        found = [products[i] for i in range(cute.size(products)) if part_of(i, parts) == part]
        top = largest(found) if dtype is Int32 else tree(cute.arch.fmax, found)
        # No key of the part is seen; and a factor may be 0.
        is_unseen = top == dtype(UNSEEN[dtype])
        tops.append(cutlass.select_(is_unseen, -Float32.inf, Float32(top) * factors[part]))
    return cute.arch.fmax(state.top[0], tree(cute.arch.fmax, tops) - Float32(offset))


def weigh(
    products: cute.Tensor, weights: cute.Tensor, state: RowState, factors, first: int
) -> None:
    """Weights of a chunk of columns from `first` on."""
    parts, top = len(factors), -state.top[0]
    for i in range(first, first + CHUNK, 2):
        factor = factors[part_of(i, parts)]
        pair = tuple(Float32(products[i + c]) for c in range(2))
        pair = cute.arch.fma_packed_f32x2(pair, (factor, factor), (top, top))
        weights[i], weights[i + 1] = (exp2_in_branch(x) for x in pair)


@cute.jit
def clear_unseen(weights: cute.Tensor, limit, first: cutlass.Constexpr):
    """0 in place of the weights of a chunk's keys from `limit` on."""
    for i in cutlass.range_constexpr(first, first + CHUNK):
        weights[i] = cutlass.select_(i < limit, weights[i], Float32(0.0))


def encode(
    weights: cute.Tensor, codes: cute.Tensor, state: RowState, first: int, is_half: bool
) -> None:
    """Codes of a chunk of weights, four a word, in the order of keys that `groups.V_ORDER` gives
    values, or two of fp16; the weights are added to the row's sum before they are rounded."""
    for word in range(0 if is_half else CHUNK // 4):
        begin = first + word // 4 * len(V_ORDER)
        places = V_ORDER[word % 4 * 4 : word % 4 * 4 + 4]
        code = pack_e4m3(*(weights[begin + place] for place in places))
        codes[first // 4 + word] = code.bitcast(Float32)
    for i in range(first, first + CHUNK if is_half else first, 2):
        codes[i // 2] = pack_half(weights[i], weights[i + 1]).bitcast(Float32)
    pairs = [(weights[i], weights[i + 1]) for i in range(first, first + CHUNK, 2)]
    sums = pairs[:_CHAINS]
    for i in range(_CHAINS, len(pairs)):
        sums[i % _CHAINS] = cute.arch.add_packed_f32x2(sums[i % _CHAINS], pairs[i])
    state.total[0] = state.total[0] + tree(operator.add, [x for pair in sums for x in pair])
