"""Queries of a work tile on their way to codes: their rows in shared memory, and the largest of a
head. What the quantisers of all architectures have in common.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import SPAN, TilePlan
from dsv4.kernels.lowp.query_maxima import QueryMaxima
from dsv4.kernels.lowp.rounding import row_scale
from dsv4.kernels.lowp.work import Work

VECTOR = VECTOR_BYTES // 2  # channels of a load
SPAN_VECTORS = SPAN // VECTOR


class QueryRows:
    """Rows of queries, as the load warp leaves them."""

    def __init__(self, config: QuantizedAttentionConfig, plan: TilePlan):
        self.config = config
        self.plan = plan
        self.scale = row_scale(config)
        self.maxima = QueryMaxima(config)

    @cute.jit
    def load(self, ctx, row, rows, vector) -> cute.Tensor:
        """Eight channels of a row as float32, zeros where there is none."""
        dtype = ctx.operands.q.element_type
        # The row in eight permutes the vectors of a span.
        span, place = vector // SPAN_VECTORS, vector % SPAN_VECTORS ^ row % 8
        offset = (span * self.plan.tile_queries + row) * SPAN + place * VECTOR
        source = cute.recast_ptr(
            ctx.smem.rows_start + cute.assume(offset, divby=VECTOR), dtype=dtype
        )
        loaded = cute.make_rmem_tensor(VECTOR, dtype)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), loaded)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        for j in cutlass.range_constexpr(VECTOR):
            value = loaded[j].to(Float32)
            if cutlass.const_expr(self.config.is_varlen):
                # Rows of the next sequence.
                value = cutlass.select_(row < rows, value, Float32(0.0))
            if cutlass.const_expr(self.config.folds_scale):
                value = value * ctx.operands.factor.bitcast(Float32)
            values[j] = value
        return values

    def turn(self, row):
        """What the row permutes vectors of codes by: spans of 128 bytes by the row in eight, spans
        of 64 by the pair of rows, spans of 32 by four of them."""
        vectors = self.plan.span_of_codes // VECTOR_BYTES
        return row // (8 // vectors) % vectors

    def times_factor(self, ctx, scale: Float32) -> Float32:
        """A scale times the factor on scores, where the queries did not have it before."""
        return scale if self.config.folds_scale else scale * ctx.operands.factor.bitcast(Float32)

    @cute.jit
    def largest_of_block(self, ctx, work: Work, row) -> Float32:
        """Largest magnitude of the 128 queries that a row is one of."""
        amax = self.maxima.of_block(ctx.operands, work, row)
        if cutlass.const_expr(self.config.folds_scale):
            # No rounding changes an order.
            amax = amax * ctx.operands.factor.bitcast(Float32)
        return amax

    def largest_of_head(self, ctx, work: Work, lane) -> Float32:
        """Largest magnitude of all queries of a head."""
        return self.maxima.of_head(ctx.operands, work, lane)
