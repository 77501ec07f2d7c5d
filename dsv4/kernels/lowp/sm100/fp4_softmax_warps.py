"""Softmax warpgroups of attention in FP4: weights of 16 keys share a scale.

A weight's code is that of 6 times its ratio to the largest of its block: one exponential, beside
the block's maximum, where torch divides by a sixth of the largest weight. That sixth is one
exponential more, for 16 weights: the scale before it is rounded, and what their ratios are added to
the row's sum by.
"""

from __future__ import annotations

import math
import operator

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.attention.softmax import exp2_in_branch
from dsv4.kernels.kit.fp4 import E2M1_MAX, pack_e2m1
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.lowp.config import P_OFFSET
from dsv4.kernels.lowp.groups import FP4_BLOCK as BLOCK
from dsv4.kernels.lowp.plan import TILE_KEYS
from dsv4.kernels.lowp.rounding import pack_e4m3
from dsv4.kernels.lowp.sm100.context import AttentionContext
from dsv4.kernels.lowp.sm100.fp4_plan import (
    ATOM_BYTES,
    DEPTH,
    WEIGHT_BYTES,
    WEIGHT_SCALE_BYTES,
    scale_word,
)
from dsv4.kernels.lowp.sm100.fp4_queries import BLOCKS, Fp4Queries
from dsv4.kernels.lowp.sm100.plan import GROUP_QUERIES
from dsv4.kernels.lowp.sm100.softmax import LOWEST, RowState
from dsv4.kernels.lowp.sm100.softmax_warps import TURNS, SoftmaxWarps, Tile

LOG2_MAX = math.log2(E2M1_MAX)


class Fp4SoftmaxWarps(SoftmaxWarps):
    """Both warpgroups."""

    make_queries = Fp4Queries

    @cute.jit
    def _step(
        self, ctx: AttentionContext, state: RowState, factors, tile: Tile, group, keys: Cursor
    ):
        """Weights of a tile."""
        products, (factor,) = self._scores(ctx, factors, tile, group, keys)
        blocks = range(0, TILE_KEYS, BLOCK)
        tops = [
            tree(cute.arch.fmax, [products[i] for i in range(first, first + BLOCK)])
            for first in blocks
        ]
        top = tree(cute.arch.fmax, tops) * factor - Float32(P_OFFSET["nvfp4"])
        top = cute.arch.fmax(state.top[0], top)
        self._raise_maximum(ctx, state, top, tile, group)
        codes = cute.make_rmem_tensor(TILE_KEYS // 8, Uint32)
        sums, scales = [], []
        TURNS.take(group, [top])
        for block in cutlass.range_constexpr(TILE_KEYS // BLOCK):
            # -inf of keys that the row does not see: their weights and their scale are 0.
            base = cute.math.fma(tops[block], factor, Float32(-LOG2_MAX))
            scales.append(exp2_in_branch(base - state.top[0]))
            base = -cute.arch.fmax(base, Float32(LOWEST))
            weights = weights_of(products, block * BLOCK, factor, base)
            if cutlass.const_expr(block + 1 == TILE_KEYS // BLOCK):
                TURNS.give(group, [weights[-1]])
            for half in cutlass.range_constexpr(2):
                codes[2 * block + half] = pack_e2m1(weights[8 * half : 8 * half + 8])
            sums.append(sum_of(weights))
        for block in cutlass.range_constexpr(TILE_KEYS // BLOCK):
            state.total[0] = cute.math.fma(sums[block], scales[block], state.total[0])
        self._store_codes(ctx, codes)
        self._store_scales(ctx, scales)
        self._signal_weights(ctx, group)

    @cute.jit
    def _store_codes(self, ctx: AttentionContext, codes: cute.Tensor):
        """Write a row's codes of weights where products read them."""
        row, vectors = cute.arch.thread_idx()[0], WEIGHT_BYTES // VECTOR_BYTES
        for i in cutlass.range_constexpr(vectors):
            place = row * WEIGHT_BYTES + (i ^ row // 2 % vectors) * VECTOR_BYTES
            target = ctx.smem.weights_start + cute.assume(place, divby=VECTOR_BYTES)
            target = cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(codes.iterator + 4 * i, cute.make_layout(4)), target)

    @cute.jit
    def _store_scales(self, ctx: AttentionContext, scales):
        """The same of its scales, a word for 64 keys."""
        row = cute.arch.thread_idx()[0]
        start = row // GROUP_QUERIES * WEIGHT_SCALE_BYTES
        start = start + scale_word(row % GROUP_QUERIES) * BLOCKS
        for step in cutlass.range_constexpr(TILE_KEYS // DEPTH):
            place = cute.assume(start + step * ATOM_BYTES, divby=BLOCKS)
            word = pack_e4m3(*scales[BLOCKS * step : BLOCKS * (step + 1)])
            cute.recast_ptr(ctx.smem.weight_scales + place, dtype=Uint32).store(word)


def weights_of(products: cute.Tensor, first: int, factor, base) -> list[Float32]:
    """Weights of a block of columns from `first` on, beside its largest."""
    weights = []
    for i in range(first, first + BLOCK, 2):
        pair = (products[i], products[i + 1])
        pair = cute.arch.fma_packed_f32x2(pair, (factor, factor), (base, base))
        weights += [exp2_in_branch(x) for x in pair]
    return weights


def sum_of(weights) -> Float32:
    """Sum of the weights of a block."""
    pairs = [(weights[i], weights[i + 1]) for i in range(0, len(weights), 2)]
    return operator.add(*tree(cute.arch.add_packed_f32x2, pairs))
