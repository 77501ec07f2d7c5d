"""Queries of a work tile, coded by the threads that will hold their scores, in torch's bits.

A thread has a row. Groups that share a scale are lanes of a warp, or two neighbouring warps.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.lowp.queries import VECTOR, QueryRows
from dsv4.kernels.lowp.rounding import abs_of, fmax_nan
from dsv4.kernels.lowp.sm100.context import AttentionContext
from dsv4.kernels.lowp.sm100.plan import GROUP_QUERIES, NamedBarriers
from dsv4.kernels.lowp.work import Work

# By granularity: distances of the lanes of a warp whose rows share a scale, where 16 queries are a
# warp's; where 32 are, the other 16 lanes have some, too.
SHARED = {
    "per_row": (),
    "per_thread": (8,),
    "per_warp": (8, 4, 2, 1),
    "per_block": (16, 8, 4, 2, 1),
    "per_64": (16, 8, 4, 2, 1),
}
BY_TWO_WARPS = ("per_block", "per_64")


class Queries(QueryRows):
    """Quantiser of queries."""

    @cute.jit
    def take(self, ctx: AttentionContext, work: Work, warp, lane) -> Float32:
        """Code a warpgroup's queries, hand them over, and release their rows where nothing else
        comes to lie there; the scale of this thread's row, times the factor on scores."""
        row, group, rows = warp * 32 + lane, warp // 4, work.rows
        if cutlass.const_expr(self.config.is_per_head):
            amax = self.largest_of_head(ctx, work, lane)
        else:
            if cutlass.const_expr(self.config.has_wide_blocks):
                amax = self.largest_of_block(ctx, work, row)
            else:
                amax = self._of_group(ctx, row, rows, warp, lane)
        scale, divisor, inverse = self.scale.of(amax)
        self._store(ctx, row, rows, divisor, inverse)
        if cutlass.const_expr(not self.plan.shares_rows):
            ctx.pipes.queries.release(lane)
        # The tensor core reads through the async proxy.
        cute.arch.fence_view_async_shared()
        ctx.pipes.coded.at(group).arrive(lane)
        return self.times_factor(ctx, scale)

    @cute.jit
    def _of_group(self, ctx: AttentionContext, row, rows, warp, lane) -> Float32:
        """Largest magnitude of the queries that share a row's scale."""
        granularity, maxima = self.config.qk_quant_gran, ctx.smem.maxima
        amax = Float32(0.0)
        for vector in cutlass.range_constexpr(self.plan.dim // VECTOR):
            values = self.load(ctx, row, rows, vector)
            amax = tree(fmax_nan, [amax, *(abs_of(values[j]) for j in range(VECTOR))])
        distances = SHARED[granularity] + (16,) * self.config.has_pairs_of_warps
        for i in cutlass.range_constexpr(len(distances)):
            amax = fmax_nan(amax, cute.arch.shuffle_sync_bfly(amax, offset=distances[i]))
        if cutlass.const_expr(granularity in BY_TWO_WARPS):
            if lane == 0:
                maxima[warp] = amax
            barrier = NamedBarriers.QUERIES + warp // 4
            cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP_QUERIES)
            amax = fmax_nan(amax, maxima[warp ^ 1])
        return amax

    @cute.jit
    def _store(self, ctx: AttentionContext, row, rows, divisor: Float32, inverse: Float32):
        """Write the codes of a row where products read them."""
        dim = self.plan.dim
        turn = self.turn(row)
        for i in cutlass.range_constexpr(dim // VECTOR_BYTES):
            codes = []
            for half in cutlass.range_constexpr(2):
                values = self.load(ctx, row, rows, 2 * i + half)
                codes += [self.scale.code(values[j], divisor, inverse) for j in range(VECTOR)]
            words = cute.make_rmem_tensor(4, Uint32)
            for j in cutlass.range_constexpr(4):
                words[j] = self.scale.pack(codes[4 * j : 4 * j + 4])
            offset = cute.assume(row * dim + (i ^ turn) * VECTOR_BYTES, divby=VECTOR_BYTES)
            target = cute.recast_ptr(ctx.smem.queries_start + offset, dtype=Uint32)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))
