"""Queries of a work tile: coded by the warps that multiply them, bit for bit as in torch.

A quad of lanes has two rows, 8 apart, of a warp's 16: the ones whose scores it will hold. Per
thread, that is a group of queries which share a scale, and the scale never leaves the registers.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import GROUP_QUERIES, SPAN, TILE_QUERIES, AttentionPlan
from dsv4.kernels.lowp.rounding import Int8Scale, abs_of, fmax_nan, pack_int8
from dsv4.kernels.lowp.sm90.context import AttentionContext
from dsv4.kernels.lowp.sm90.work import Work

CHUNK = VECTOR_BYTES  # channels whose codes are one vector
VECTOR = VECTOR_BYTES // 2  # channels of one load
BARRIER = 4  # named barrier of the first warpgroup's queries; those of the others follow


class Queries:
    """Quantiser of queries."""

    def __init__(self, config: QuantizedAttentionConfig, plan: AttentionPlan):
        self.config = config
        self.plan = plan
        self.scale = Int8Scale(config.quantizer, not config.folds_scale)
        self.chunks = plan.dim // CHUNK // 4  # of a lane in each of its rows

    @cute.jit
    def take(self, ctx: AttentionContext, work: Work, warp, lane) -> Float32:
        """Code a warpgroup's queries into shared memory, and release them; the scale of this
        thread's rows, times the factor on scores."""
        group = warp // 4
        values = self._load(ctx, work, warp, lane)
        factor = ctx.operands.factor.bitcast(Float32)
        if cutlass.const_expr(self.config.folds_scale):
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] = values[i] * factor
        magnitudes = [abs_of(values[i]) for i in range(cute.size(values))]
        amax = self._amax(ctx, tree(fmax_nan, magnitudes), warp, lane)
        # What the largest of all values is known from has been read.
        ctx.pipes.queries.release(lane)
        scale = self._encode(values, amax)
        # All warps' products with the queries before are over: PTX does not say that a warp's part
        # of a product reads that warp's rows alone.
        sync(group)
        self._store(ctx, values, warp, lane)
        # wgmma reads through the async proxy.
        cute.arch.fence_view_async_shared()
        sync(group)
        if cutlass.const_expr(self.config.folds_scale):
            return scale
        return scale * factor

    @cute.jit
    def _load(self, ctx: AttentionContext, work: Work, warp, lane):
        """This lane's channels of its two rows as float32, zeros where there are none."""
        dtype = ctx.operands.q.element_type
        values = cute.make_rmem_tensor((CHUNK, self.chunks, 2), Float32)
        for r in cutlass.range_constexpr(2):
            row = warp * 16 + lane // 4 + 8 * r
            for i in cutlass.range_constexpr(self.chunks):
                for half in cutlass.range_constexpr(CHUNK // VECTOR):
                    # The row in eight permutes the vectors of a span.
                    vector = (lane % 4 * (CHUNK // VECTOR) + half) ^ (row % 8)
                    offset = (i * TILE_QUERIES + row) * SPAN + vector * VECTOR
                    source = cute.recast_ptr(
                        ctx.smem.rows_start + cute.assume(offset, divby=VECTOR), dtype=dtype
                    )
                    loaded = cute.make_rmem_tensor(VECTOR, dtype)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), loaded)
                    for j in cutlass.range_constexpr(VECTOR):
                        value = loaded[j].to(Float32)
                        if cutlass.const_expr(self.config.is_varlen):
                            # Rows of the next sequence.
                            value = cutlass.select_(row < work.rows, value, Float32(0.0))
                        values[half * VECTOR + j, i, r] = value
        return values

    @cute.jit
    def _amax(self, ctx: AttentionContext, amax: Float32, warp, lane) -> Float32:
        """Largest magnitude of the group of queries that this thread's rows belong to."""
        granularity, maxima = self.config.qk_quant_gran, ctx.smem.maxima
        for offset in cutlass.range_constexpr(2):
            amax = fmax_nan(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << offset))
        if cutlass.const_expr(granularity != "per_thread"):
            for offset in cutlass.range_constexpr(2, 5):
                amax = fmax_nan(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << offset))
        if cutlass.const_expr(granularity == "per_block"):
            if lane == 0:
                maxima[warp] = amax
            sync(warp // 4)
            first = warp // 4 * 4
            for i in cutlass.range_constexpr(4):
                amax = fmax_nan(amax, maxima[first + i])
        return amax

    @cute.jit
    def _encode(self, values: cute.Tensor, amax: Float32) -> Float32:
        """Replace values by numbers whose integer parts are the codes; their scale."""
        scale, divisor, inverse = self.scale.of(amax)
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = self.scale.code(values[i], divisor, inverse)
        return scale

    @cute.jit
    def _store(self, ctx: AttentionContext, values: cute.Tensor, warp, lane):
        """Write a lane's codes where the product reads them."""
        dim = self.plan.dim
        for r in cutlass.range_constexpr(2):
            row = warp % 4 * 16 + lane // 4 + 8 * r
            # Spans of 128 bytes are permuted by the row in eight, spans of 64 by the pair of rows.
            turn = row % 8 if dim == 128 else row // 2 % 4
            for i in cutlass.range_constexpr(self.chunks):
                chunk = (lane % 4 + 4 * i) ^ turn
                offset = (warp // 4 * GROUP_QUERIES + row) * dim + chunk * CHUNK
                target = cute.recast_ptr(
                    ctx.smem.queries_start + cute.assume(offset, divby=CHUNK), dtype=Uint32
                )
                words = cute.make_rmem_tensor(CHUNK // 4, Uint32)
                for j in cutlass.range_constexpr(CHUNK // 4):
                    words[j] = pack_int8(*(values[4 * j + k, i, r] for k in range(4)))
                cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(CHUNK // 4)))


def sync(group) -> None:
    """Named barrier of a warpgroup."""
    cute.arch.barrier(barrier_id=BARRIER + group, number_of_threads=128)
