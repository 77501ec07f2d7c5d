"""Epilogue of the heads-in-M kernel: output scale, lse, store."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sink_merge import output_scale, row_lse
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import DTYPE, HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows
from dsv4.kernels.attention.sm90.plan import HeadsMPlan
from dsv4.kernels.kit.epilogue import WARP_ROWS, stage_rows, store_rows
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tma import tma_store


@cute.jit
def load_sinks(sink_logits, head, heads: cutlass.Constexpr):
    """Sinks of a thread's two rows, from `head` on; 0 for padding."""
    sinks = cute.make_rmem_tensor(2, cutlass.Float32)
    sinks.fill(0.0)
    for r in cutlass.range_constexpr(2):
        if head + 8 * r < heads:
            sinks[r] = sink_logits[head + 8 * r]
    return sinks


class RowStatistics:
    """Finished softmax state of rows: their output scale and lse, or what a split leaves."""

    def __init__(self, config: FmhaConfig, combine: HeadsMCombine):
        self.num_query_heads = config.num_query_heads
        self.is_softmax_sink = config.sink_mode == "softmax"
        self.combine = combine

    @cute.jit
    def finish(self, ctx: HeadsMContext, coord, first_row, rows: Rows, gate_offset, sinks):
        """Finish a thread's two rows, for the output warpgroups and for the caller."""
        lse, row_scale = ctx.operands.lse, ctx.smem.row_scale
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            head = ctx.tiling.own_head(coord.head + row, row, self.num_query_heads)
            row_max, row_sum = rows.row_max[r], rows.row_sum[r]
            if ctx.tiling.num_splits > 1:
                row_scale[row] = gate_offset[r]
                if row < ctx.tiling.tile_heads:
                    self.combine.store_statistics(ctx, coord, row, row_max, row_sum)
            else:
                scale = cutlass.Float32(0.0)
                if head < self.num_query_heads:
                    scale = output_scale(row_max, row_sum, sinks[r], self.is_softmax_sink)
                    is_first = ctx.tiling.column_slice(cute.arch.block_idx()[0]) == 0
                    if coord.token < lse.shape[0] and is_first:
                        lse[coord.token, head] = row_lse(row_max, row_sum, gate_offset[r])
                row_scale[row] = scale


class Staging(NamedTuple):
    """Shared memory and descriptor through which the rows of a CTA's last work tile are stored."""

    o_maps: tuple  # the TMA descriptor of o, or nothing: rows are never staged
    target: cute.Pointer  # free after the CTA's last key tile
    is_last: cutlass.Boolean  # whether this is the CTA's last work tile


class Epilogue:
    """Epilogue of a work tile that has all of a token's keys.

    Attributes:
        can_stage: whether a swizzle span is as wide as `stage_rows` writes it.
    """

    def __init__(self, num_query_heads: int, plan: HeadsMPlan):
        self.num_query_heads = num_query_heads
        self.plan = plan
        self.can_stage = plan.chunk_bytes == SPAN_BYTES

    @cute.jit
    def store(
        self, ctx: HeadsMContext, coord, subtile, acc, scales, column, is_sliced, staging: Staging
    ):
        """Write a warp's rows from `column` on: one accumulator sub-tile of them where two CTAs
        slice the columns, else all that are accumulated.
        """
        lane = cute.arch.lane_idx()
        row = cute.arch.thread_idx()[0] % 128 // 32 * WARP_ROWS + lane // 4
        head = ctx.tiling.own_head(coord.head + row, row, self.num_query_heads)
        place = (
            *(ctx.operands.o, scales, coord.token, head, column, lane),
            self.num_query_heads,
        )
        o_maps = staging.o_maps
        is_staged = cutlass.Boolean(False)
        if cutlass.const_expr(len(o_maps) > 0):
            is_staged = staging.is_last
        if is_sliced:
            store_rows(subtile, *place)
        elif not is_staged:
            store_rows(acc, *place)
        if cutlass.const_expr(len(o_maps) > 0):  # noqa: SIM102 static, then dynamic
            if is_staged:
                self._store_staged(acc, scales, o_maps[0], staging.target, coord, column, lane)

    @cute.jit
    def _store_staged(self, acc, scales, o_map, target: cute.Pointer, coord, column, lane):
        """Write a warp's rows through shared memory: with fewer instructions than `store_rows`,
        they are on their way sooner. Rows of no head are out of bounds.

        Args:
            target: free shared memory, half of a key tile for all warps.
        """
        chunk, half_dim = self.plan.chunk, self.plan.half_dim
        warp = cute.arch.thread_idx()[0] % 128 // 32
        size = cute.size(acc) * chunk // half_dim
        for i in cutlass.range_constexpr(half_dim // chunk):
            part = cute.make_tensor(acc.iterator + i * size, cute.make_layout(size))
            spans = half_dim // chunk * warp + i
            span = target + spans * WARP_ROWS * chunk
            stage_rows(part, scales, span, lane, DTYPE)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                place = [0, coord.head + warp * WARP_ROWS, column // chunk + i, coord.token]
                tma_store(o_map, span, place)
                cute.arch.cp_async_bulk_commit_group()
        if lane == 0:
            # Shared memory must outlive the reads of the stores.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
