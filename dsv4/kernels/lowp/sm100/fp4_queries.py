"""Queries of a work tile in FP4: a scale for 16 channels, in torch's bits. A thread has a row."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.kit.fp4 import pack_e2m1
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.lowp.fp4 import block_scale
from dsv4.kernels.lowp.groups import FP4_BLOCK as BLOCK
from dsv4.kernels.lowp.plan import SPAN
from dsv4.kernels.lowp.queries import VECTOR, QueryRows
from dsv4.kernels.lowp.rounding import abs_of, fmax_nan, pack_e4m3
from dsv4.kernels.lowp.sm100.context import AttentionContext
from dsv4.kernels.lowp.sm100.fp4_plan import ATOM_BYTES, DEPTH, MEAN_ROWS, scale_word
from dsv4.kernels.lowp.sm100.plan import GROUP_QUERIES, NamedBarriers
from dsv4.kernels.lowp.work import Work

BLOCKS = DEPTH // BLOCK  # of a word of scales
VECTOR_CODES = 2 * VECTOR_BYTES  # of a store


def swizzled(channel, row: int):
    """Place of a channel among the 64 of a span, in a row."""
    return (channel % SPAN // VECTOR ^ row % MEAN_ROWS) * VECTOR + channel % VECTOR


class Fp4Queries(QueryRows):
    """Quantiser of queries."""

    @cute.jit
    def take(self, ctx: AttentionContext, work: Work, warp, lane) -> Float32:
        """Code a warpgroup's queries, hand them over, and release their rows; the factor on
        scores."""
        row = warp * 32 + lane
        if cutlass.const_expr(self.config.smooth_q):
            self._find_means(ctx, row, work.rows)
        for first in cutlass.range_constexpr(0, self.plan.dim, DEPTH):
            self._store(ctx, row, work.rows, first)
        ctx.pipes.queries.release(lane)
        # The tensor core reads through the async proxy.
        cute.arch.fence_view_async_shared()
        ctx.pipes.coded.at(warp // 4).arrive(lane)
        return ctx.operands.factor.bitcast(Float32)

    @cute.jit
    def _find_means(self, ctx: AttentionContext, row, rows):
        """Means of the channels of a warpgroup's queries, a channel a thread, in torch's order and
        rounded as torch does, to where products and all threads read them."""
        group, channel = row // GROUP_QUERIES, row % GROUP_QUERIES
        dtype = ctx.operands.q.element_type
        if channel < self.plan.dim:
            first = group * GROUP_QUERIES
            count = cutlass.max(cutlass.min(rows - first, GROUP_QUERIES), 1)
            total = self._sum_of_rows(ctx, first, channel, count, 0, 1)
            mean = (total / Float32(count)).to(dtype)
            start = group * (self.plan.mean_bytes // 2) + channel // SPAN * (MEAN_ROWS * SPAN)
            target = cute.recast_ptr(ctx.smem.means, dtype=dtype) + start
            for i in cutlass.range_constexpr(MEAN_ROWS):
                (target + (i * SPAN + swizzled(channel, i))).store(mean)
        barrier = NamedBarriers.QUERIES + group
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP_QUERIES)

    def _sum_of_rows(self, ctx: AttentionContext, first, channel, count, row: int, step: int):
        """Sum over every row in `step` from `row` on: halves of halves, as `column_sums`."""
        if step < GROUP_QUERIES:
            low = self._sum_of_rows(ctx, first, channel, count, row, 2 * step)
            return low + self._sum_of_rows(ctx, first, channel, count, row + step, 2 * step)
        rows = cute.recast_ptr(ctx.smem.rows_start, dtype=ctx.operands.q.element_type)
        place = (channel // SPAN * self.plan.tile_queries + first + row) * SPAN
        value = (rows + (place + swizzled(channel, row))).load().to(Float32)
        if not self.config.is_varlen:
            return value
        # Rows of the next sequence.
        return cutlass.select_(row < count, value, Float32(0.0))

    @cute.jit
    def _load_means(self, ctx: AttentionContext, row, first: cutlass.Constexpr) -> list:
        """Means of a block's channels from `first` on."""
        dtype = ctx.operands.q.element_type
        start = row // GROUP_QUERIES * (self.plan.mean_bytes // 2)
        start = start + first // SPAN * (MEAN_ROWS * SPAN) + first % SPAN
        means = cute.make_rmem_tensor(BLOCK, dtype)
        for half in cutlass.range_constexpr(BLOCK // VECTOR):
            place = cute.assume(start + half * VECTOR, divby=VECTOR)
            source = cute.recast_ptr(ctx.smem.means + place, dtype=dtype)
            vector = cute.make_tensor(means.iterator + half * VECTOR, cute.make_layout(VECTOR))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), vector)
        return [means[i].to(Float32) for i in range(BLOCK)]

    @cute.jit
    def _store(self, ctx: AttentionContext, row, rows, first: cutlass.Constexpr):
        """Write the codes and the word of scales of a row's 64 channels from `first` on."""
        words, scales = cute.make_rmem_tensor(DEPTH // 8, Uint32), []
        for block in cutlass.range_constexpr(BLOCKS):
            begin = (first + block * BLOCK) // VECTOR
            parts = [self.load(ctx, row, rows, begin + half) for half in range(BLOCK // VECTOR)]
            values = [part[j] for part in parts for j in range(VECTOR)]
            if cutlass.const_expr(self.config.smooth_q):
                means = self._load_means(ctx, row, first + block * BLOCK)
                values = [x - mean for x, mean in zip(values, means)]
            unrounded, inverse = block_scale(tree(fmax_nan, [abs_of(x) for x in values]))
            scales.append(unrounded)
            for half in cutlass.range_constexpr(2):
                codes = [x * inverse for x in values[8 * half : 8 * half + 8]]
                words[2 * block + half] = pack_e2m1(codes)
        for i in cutlass.range_constexpr(DEPTH // VECTOR_CODES):
            vector = (first // VECTOR_CODES + i) ^ self.turn(row)
            offset = row * self.plan.row_bytes + vector * VECTOR_BYTES
            target = ctx.smem.queries_start + cute.assume(offset, divby=VECTOR_BYTES)
            target = cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(words.iterator + 4 * i, cute.make_layout(4)), target)
        group = row // GROUP_QUERIES
        place = group * self.plan.query_scale_bytes + first // DEPTH * ATOM_BYTES
        place = place + scale_word(row % GROUP_QUERIES) * BLOCKS
        target = ctx.smem.query_scales + cute.assume(place, divby=BLOCKS)
        cute.recast_ptr(target, dtype=Uint32).store(pack_e4m3(*scales))
