"""End of a work tile: outputs and log-sum-exp, a row a thread."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.vectors import address_of, pointer_to, vector_at
from dsv4.kernels.lowp.config import LOG2E, QuantizedAttentionConfig
from dsv4.kernels.lowp.sm100.context import AttentionContext, columns_of
from dsv4.kernels.lowp.sm100.plan import AttentionPlanSm100
from dsv4.kernels.lowp.sm100.softmax import RowState
from dsv4.kernels.lowp.sm100.tmem_rows import load_row
from dsv4.kernels.lowp.work import Operands, Work, row_of

VECTOR = 8  # channels of a store
COLUMNS = 32  # of sums that are in registers at once


class Epilogue:
    """Outputs and lse of a warpgroup's rows."""

    def __init__(self, config: QuantizedAttentionConfig, plan: AttentionPlanSm100):
        self.config = config
        self.plan = plan

    @cute.jit
    def store(self, ctx: AttentionContext, state: RowState, has_sums, warp, lane, parity):
        """Write a work tile's rows; 0 and -inf of a row without keys.

        Args:
            has_sums: whether the warpgroup saw any keys: else its sums were never written.
        """
        work = Work.load(ctx.smem.works[None, parity])
        row, total = warp * 32 + lane, state.total[0]
        safe = cutlass.select_(total == 0.0, Float32(1.0), Float32(total))
        inverse = cutlass.select_(total == 0.0, Float32(0.0), Float32(1.0) / safe)
        self._store_row(ctx, work, total, inverse, has_sums, row, warp, parity)
        if ctx.operands.lse.shape[0] != 0:
            self._store_lse(ctx.operands, work, state, row)

    @cute.jit
    def _store_row(
        self, ctx: AttentionContext, work: Work, total, inverse, has_sums, row, warp, parity
    ):
        """Scale, round and write 16 bytes at a time."""
        operands, dim = ctx.operands, self.config.head_dim
        scales, out = ctx.smem.value_scales[None, parity], operands.out
        place = row_of(out, work.batch, work.head, work.first_row + row)
        sequence = cutlass.min(work.sequence, Int32(operands.vm.shape[0]) - 1)
        start = columns_of(ctx, self.plan, "sums", warp // 4)
        for first in cutlass.range_constexpr(0, dim, COLUMNS):
            sums = cute.make_rmem_tensor(COLUMNS, Float32)
            sums.fill(0.0)
            if has_sums:
                load_row(start + first, sums)
                cute.arch.fence_view_async_tmem_load()
            for begin in cutlass.range_constexpr(0, COLUMNS, VECTOR):
                values = cute.make_rmem_tensor(VECTOR, out.element_type)
                for j in cutlass.range_constexpr(VECTOR):
                    value = sums[begin + j] * inverse
                    if cutlass.const_expr(self.plan.scaled_channels > 0):
                        value = value * scales[first + begin + j]
                    if cutlass.const_expr(self.config.smooth_v):
                        channel = cutlass.min(first + begin + j, dim - 1)
                        mean = operands.vm[sequence, work.key_head, channel]
                        value = value + cutlass.select_(total != 0.0, mean, Float32(0.0))
                    values[j] = value.to(out.element_type)
                if cutlass.const_expr(first + begin < dim):  # noqa: SIM102 static, then dynamic
                    if row < work.rows:
                        address = (out.iterator + (place + first + begin)).toint()
                        target = pointer_to(address, out.element_type, VECTOR_BYTES)
                        cute.autovec_copy(
                            values, cute.make_tensor(target, cute.make_layout(VECTOR))
                        )

    @cute.jit
    def _store_lse(self, operands: Operands, work: Work, state: RowState, row):
        """Log-sum-exp of a row, with what the mean of the keys has taken from its scores."""
        moved = Float32(0.0)
        if operands.km.shape[0] != 0:
            moved = self._mean_score(operands, work, row)
        total = state.total[0]
        lse = (cute.math.log2(total) + state.top[0]) / Float32(LOG2E) + moved
        lse = cutlass.select_(total == 0.0, -Float32.inf, Float32(lse))
        if row < work.rows:
            stride = operands.lse.stride
            offset = Int64(work.batch) * stride[0] + Int64(work.head) * stride[1]
            target = operands.lse.iterator + (offset + work.first_row + row)
            target.store(Float32(lse))

    @cute.jit
    def _mean_score(self, operands: Operands, work: Work, row) -> Float32:
        """Scaled score of a row with the mean of the keys."""
        q, km, dim = operands.q, operands.km, self.config.head_dim
        sequence = cutlass.min(work.sequence, Int32(km.shape[0]) - 1)
        total = Float32(0.0)
        if row < work.rows:
            start = address_of(q, row_of(q, work.batch, work.head, work.first_row + row))
            for first in cutlass.range_constexpr(0, dim, COLUMNS):
                # All loads of a chunk are under way before the first is waited for.
                channels = range(first, min(first + COLUMNS, dim))
                means = [km[sequence, work.key_head, channel] for channel in channels]
                vectors = []
                for channel in channels[::VECTOR]:
                    vector = cute.make_rmem_tensor(VECTOR, q.element_type)
                    cute.autovec_copy(vector_at(start, q.element_type, channel), vector)
                    vectors.append(vector)
                for i in cutlass.range_constexpr(len(means)):
                    query = vectors[i // VECTOR][i % VECTOR].to(Float32)
                    total = cute.math.fma(query, means[i].to(Float32), total)
        return total * (operands.factor.bitcast(Float32) / Float32(LOG2E))
