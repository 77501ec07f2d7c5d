"""End of a work tile: sums over quads, outputs by rows, log-sum-exp."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from dsv4.kernels.kit.epilogue import quad_transpose
from dsv4.kernels.kit.reduce import quad_sum
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.vectors import pointer_to
from dsv4.kernels.lowp.config import LOG2E, QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import AttentionPlan
from dsv4.kernels.lowp.sm90.context import AttentionContext
from dsv4.kernels.lowp.sm90.softmax import RowState
from dsv4.kernels.lowp.work import Operands, Work, row_of

VECTOR = 8  # channels of a store, and of a column group of a fragment
TOGETHER = 4  # column groups that a quad transposes


class Epilogue:
    """Outputs and lse of a warpgroup's rows."""

    def __init__(self, config: QuantizedAttentionConfig, plan: AttentionPlan):
        self.config = config
        self.plan = plan

    @cute.jit
    def store(self, ctx: AttentionContext, sums: cute.Tensor, state: RowState, warp, lane, parity):
        """Write a work tile's rows; 0 and -inf of a row without keys.

        Args:
            sums: [row of the thread, column of a pair, group of eight columns] float32.
        """
        operands, work = ctx.operands, Work.load(ctx.smem.works[None, parity])
        scales = ctx.smem.value_scales[None, parity]
        inverse = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = quad_sum(state.total[r])
            state.total[r] = total
            safe = cutlass.select_(total == 0.0, Float32(1.0), Float32(total))
            inverse[r] = cutlass.select_(total == 0.0, Float32(0.0), Float32(1.0) / safe)
        row = warp * 16 + lane // 4
        self._store_rows(operands, work, sums, state, inverse, scales, row, lane)
        if operands.lse.shape[0] != 0:
            self._store_lse(operands, work, state, row, lane)

    @cute.jit
    def _store_rows(
        self, operands: Operands, work: Work, sums, state: RowState, inverse, scales, row, lane
    ):
        """Scale, round and write 16 bytes at a time."""
        out, dim = operands.out, self.config.head_dim
        dtype, quad = operands.out.element_type, lane % 4
        sequence = cutlass.min(work.sequence, Int32(operands.vm.shape[0]) - 1)
        targets = [
            row_of(out, work.batch, work.head, work.first_row + row + 8 * r) for r in range(2)
        ]
        for first in cutlass.range_constexpr(0, self.plan.dim // 8, TOGETHER):
            if cutlass.const_expr(first * 8 < dim):
                factors = self._factors(operands, work, scales, first, quad)
                means = self._means(operands, work, sequence, first, quad)
                for r in cutlass.range_constexpr(2):
                    values = cute.make_rmem_tensor(2 * TOGETHER, dtype)
                    for j in cutlass.range_constexpr(TOGETHER):
                        for c in cutlass.range_constexpr(2):
                            value = sums[r, c, first + j] * inverse[r]
                            value = value * factors[j][c]
                            if cutlass.const_expr(self.config.smooth_v):
                                has_keys = state.total[r] != 0.0
                                mean = cutlass.select_(has_keys, means[j][c], Float32(0.0))
                                value = value + mean
                            values[2 * j + c] = value.to(dtype)
                    quad_transpose(cute.recast_tensor(values, Int32), quad)
                    channel = (first + quad) * VECTOR
                    if row + 8 * r < work.rows and channel < dim:
                        address = (out.iterator + (targets[r] + channel)).toint()
                        target = pointer_to(address, dtype, VECTOR_BYTES)
                        cute.autovec_copy(
                            values, cute.make_tensor(target, cute.make_layout(VECTOR))
                        )

    def _factors(self, operands: Operands, work: Work, scales: cute.Tensor, first: int, quad):
        """Scales of the channels of some column groups."""
        if self.config.pv == "fp16":
            return [[Float32(1.0)] * 2] * TOGETHER
        if self.plan.scaled_channels == 0:
            # Rows behind the last sequence are nobody's.
            sequence = cutlass.min(work.sequence, Int32(operands.v_scale.shape[0]) - 1)
            scales = operands.v_scale[sequence, work.key_head, None]
        return [[scales[(first + j) * 8 + quad * 2 + c] for c in range(2)] for j in range(TOGETHER)]

    @cute.jit
    def _means(self, operands: Operands, work: Work, sequence, first: cutlass.Constexpr, quad):
        """Means of the channels of some column groups, zeros where nothing was taken off."""
        found = [cute.make_rmem_tensor(2, Float32) for _ in range(TOGETHER)]
        if cutlass.const_expr(self.config.smooth_v):
            for j in cutlass.range_constexpr(TOGETHER):
                for c in cutlass.range_constexpr(2):
                    channel = (first + j) * 8 + quad * 2 + c
                    channel = cutlass.min(channel, self.config.head_dim - 1)
                    found[j][c] = operands.vm[sequence, work.key_head, channel]
        return found

    @cute.jit
    def _store_lse(self, operands: Operands, work: Work, state: RowState, row, lane):
        """Log-sum-exp of the rows, with what the mean of the keys has taken from their scores."""
        moved = cute.make_rmem_tensor(2, Float32)
        moved.fill(0.0)
        if operands.km.shape[0] != 0:
            self._mean_scores(operands, work, row, lane, moved)
        for r in cutlass.range_constexpr(2):
            total, top = state.total[r], state.top[r]
            lse = (cute.math.log2(total) + top) / Float32(LOG2E) + moved[r]
            lse = cutlass.select_(total == 0.0, -Float32.inf, Float32(lse))
            if lane % 4 == 0 and row + 8 * r < work.rows:
                stride = operands.lse.stride
                offset = Int64(work.batch) * stride[0] + Int64(work.head) * stride[1]
                target = operands.lse.iterator + (offset + work.first_row + row + 8 * r)
                target.store(Float32(lse))

    @cute.jit
    def _mean_scores(self, operands: Operands, work: Work, row, lane, moved: cute.Tensor):
        """Scaled scores of the rows with the mean of the keys, a quad each."""
        q, km, dim = operands.q, operands.km, self.config.head_dim
        sequence = cutlass.min(work.sequence, Int32(km.shape[0]) - 1)
        for r in cutlass.range_constexpr(2):
            total = Float32(0.0)
            at = cutlass.min(row + 8 * r, work.rows - 1)
            if work.rows > 0:
                start = q.iterator + row_of(q, work.batch, work.head, work.first_row + at)
                query = cute.make_tensor(start, cute.make_layout(dim))
                for channel in cutlass.range(lane % 4, dim, 4, unroll=4):
                    mean = km[sequence, work.key_head, channel].to(Float32)
                    total = cute.math.fma(query[channel].to(Float32), mean, total)
            moved[r] = quad_sum(total) * (operands.factor.bitcast(Float32) / Float32(LOG2E))
