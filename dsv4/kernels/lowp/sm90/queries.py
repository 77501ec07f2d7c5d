"""Queries of a work tile: coded by the warps that multiply them, bit for bit as in torch.

A quad of lanes has two rows, 8 apart, of a warp's 16: the ones whose scores it will hold. Per
thread, that is a group of queries which share a scale, and the scale never leaves the registers;
per row, each has its own. Groups of 32 queries are those of two warps, which show each other their
maxima.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.lowp.plan import GROUP_QUERIES
from dsv4.kernels.lowp.queries import VECTOR, QueryRows
from dsv4.kernels.lowp.rounding import abs_of, across_lanes, fmax_nan
from dsv4.kernels.lowp.sm90.context import AttentionContext
from dsv4.kernels.lowp.work import Work

LANES, ROWS = 4, 2  # of a quad
BARRIER = 4  # named barrier of the first warpgroup's queries; those of the others follow


class Queries(QueryRows):
    """Quantiser of queries."""

    @cute.jit
    def take(self, ctx: AttentionContext, work: Work, warp, lane):
        """Code a warpgroup's queries into shared memory, and release them; the scales of this
        thread's rows, times the factor on scores."""
        group, row, rows = warp // 4, warp * 16 + lane // 4, work.rows
        part = lane % LANES
        if cutlass.const_expr(self.config.is_per_head):
            amax = [self.largest_of_head(ctx, work, lane)] * 2
        elif cutlass.const_expr(self.config.has_wide_blocks):
            amax = [self.largest_of_block(ctx, work, row)] * 2
        else:
            amax = [across_lanes(fmax_nan, x, LANES) for x in self._amax(ctx, row, rows, part)]
            if cutlass.const_expr(self.config.qk_quant_gran != "per_row"):
                amax = [self._of_group(ctx, fmax_nan(*amax), warp, lane)] * 2
        found = [self.scale.of(x) for x in amax]
        # All warps' products with the queries before are over: PTX does not say that a warp's part
        # of a product reads that warp's rows alone.
        sync(group)
        self._store(ctx, row, rows, part, found)
        ctx.pipes.queries.release(lane)
        # wgmma reads through the async proxy.
        cute.arch.fence_view_async_shared()
        sync(group)
        return tuple(self.times_factor(ctx, x[0]) for x in found)

    @cute.jit
    def _of_group(self, ctx: AttentionContext, amax: Float32, warp, lane) -> Float32:
        """Largest magnitude of the queries that share a scale."""
        granularity, maxima = self.config.qk_quant_gran, ctx.smem.maxima
        if cutlass.const_expr(granularity != "per_thread"):
            for offset in cutlass.range_constexpr(2, 5):
                amax = fmax_nan(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << offset))
        if cutlass.const_expr(self.config.has_pairs_of_warps):
            groups = self.plan.warp_maxima
            if lane % LANES == 0 and lane // LANES < groups:
                maxima[warp * groups + lane // LANES] = amax
            sync(warp // 4)
            amax = fmax_nan(amax, maxima[(warp ^ 1) * groups + lane // LANES % groups])
        if cutlass.const_expr(granularity in ("per_block", "per_64")):
            if lane == 0:
                maxima[warp] = amax
            sync(warp // 4)
            first = warp // 4 * 4
            for i in cutlass.range_constexpr(4):
                amax = fmax_nan(amax, maxima[first + i])
        return amax

    @cute.jit
    def _amax(self, ctx: AttentionContext, row, rows, part) -> tuple[Float32, Float32]:
        """Largest magnitude of each of a lane's rows."""
        first, second = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(self.plan.dim // VECTOR // LANES):
            vector = i // 2 * (2 * LANES) + part * 2 + i % 2
            values = [self.load(ctx, row + 8 * r, rows, vector) for r in range(ROWS)]
            found = [[abs_of(x[j]) for j in range(VECTOR)] for x in values]
            first = tree(fmax_nan, [first, *found[0]])
            second = tree(fmax_nan, [second, *found[1]])
        return first, second

    @cute.jit
    def _store(self, ctx: AttentionContext, row, rows, part, scales):
        """Write the codes of a lane's rows where the product reads them."""
        span, turn = self.plan.span_of_codes, self.turn(row)
        spans = self.plan.row_bytes // span
        for i in cutlass.range_constexpr(self.plan.dim // VECTOR // LANES):
            vector = i // 2 * (2 * LANES) + part * 2 + i % 2
            # A quad has 64 bytes of a span.
            own = i // 2 * LANES * VECTOR_BYTES // span
            at = vector // 2 - own * (span // VECTOR_BYTES)
            place = (at ^ turn) * VECTOR_BYTES + vector % 2 * VECTOR
            if cutlass.const_expr(spans > 1):
                # Those of a warpgroup's rows lie one after the other.
                place += (row // GROUP_QUERIES * (spans - 1) + own) * (GROUP_QUERIES * span)
            for r in cutlass.range_constexpr(ROWS):
                _, divisor, inverse = scales[r]
                values = self.load(ctx, row + 8 * r, rows, vector)
                codes = [self.scale.code(values[j], divisor, inverse) for j in range(VECTOR)]
                offset = (row + 8 * r) * span + place
                target = cute.recast_ptr(
                    ctx.smem.queries_start + cute.assume(offset, divby=VECTOR), dtype=Uint32
                )
                words = cute.make_rmem_tensor(VECTOR // 4, Uint32)
                for j in cutlass.range_constexpr(VECTOR // 4):
                    words[j] = self.scale.pack(codes[4 * j : 4 * j + 4])
                cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(VECTOR // 4)))


def sync(group) -> None:
    """Named barrier of a warpgroup."""
    cute.arch.barrier(barrier_id=BARRIER + group, number_of_threads=128)
