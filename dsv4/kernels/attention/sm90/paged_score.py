"""Score warpgroup of the paged heads-in-M kernel: rows of a key tile that are no keys may stand
anywhere in it."""

import operator

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_epilogue import RowStatistics
from dsv4.kernels.attention.sm90.heads_m_score import ScoreFragments, ScoreWarpgroup
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows
from dsv4.kernels.attention.sm90.plan import GATHER_WARPS, WARP_KEYS
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.reduce import quad_max, quad_sum, tree
from dsv4.kernels.kit.wgmma import by_row


class PagedRowStatistics(RowStatistics):
    """Row statistics with the largest scores, which launches without splits alone store."""

    @cute.jit
    def finish(self, ctx: HeadsMContext, coord, first_row, rows: Rows, gate_offset, sinks):
        super().finish(ctx, coord, first_row, rows, gate_offset, sinks)
        max_logits = ctx.operands.max_logits
        is_first = ctx.tiling.column_slice(cute.arch.block_idx()[0]) == 0
        if coord.token < max_logits.shape[0] and is_first:
            for r in cutlass.range_constexpr(2):
                head = coord.head + first_row + 8 * r
                if head < self.num_query_heads:
                    max_logits[coord.token, head] = rows.largest[r] * LN_2


class PagedScoreWarpgroup(ScoreWarpgroup):
    """Masks keys by a bit each; rows that are no keys have been filled with zeros."""

    statistics_type = PagedRowStatistics

    def _make_rows(self) -> Rows:
        scale, largest = (cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(2))
        return Rows.make()._replace(scale=scale, largest=largest)

    @cute.jit
    def _load_scales(self, ctx: HeadsMContext, f: ScoreFragments, coord):
        q_factor, scale = ctx.operands.q_factor, f.rows.scale
        f.rows.largest.fill(-cutlass.Float32.inf)
        for r in cutlass.range_constexpr(2):
            scale[r] = cutlass.Float32(self.scale_log2)
            head = coord.head + f.row + 8 * r
            if coord.token < q_factor.shape[0] and head < self.num_query_heads:
                scale[r] = self.scale_log2 * q_factor[coord.token, head]

    def _tile_info(self, ctx: HeadsMContext, kv: Cursor):
        """A word of each warp that has gathered rows of the tile."""
        words = cute.make_rmem_tensor(GATHER_WARPS, cutlass.Int32)
        start = ctx.smem.tile_info.iterator + kv.stage * GATHER_WARPS
        start = cute.make_ptr(cutlass.Int32, start.toint(), start.memspace, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(GATHER_WARPS)), words)
        return tuple(words[i] for i in range(GATHER_WARPS))

    @cute.jit
    def _mask(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor, tile_info):
        all_keys = 2**WARP_KEYS - 1
        if tree(operator.and_, list(tile_info)) & all_keys != all_keys:
            s = by_row(f.s)
            words = [word >> f.lane % 4 * 2 for word in tile_info]
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    is_key = words[j * 8 // WARP_KEYS] & 1 << j * 8 % WARP_KEYS + c != 0
                    for r in cutlass.range_constexpr(2):
                        s[r, c, j] = cutlass.select_(is_key, s[r, c, j], -cutlass.Float32.inf)
        if ctx.operands.max_logits.shape[0] > 0:
            s, largest = by_row(f.s), f.rows.largest
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        largest[r] = cute.arch.fmax(largest[r], s[r, c, j] * f.rows.scale[r])
        return tile_info[0] > all_keys

    @cute.jit
    def _reduce(self, ctx: HeadsMContext, rows: Rows):
        for r in cutlass.range_constexpr(2):
            rows.row_sum[r] = quad_sum(rows.row_sum[r])
        if ctx.operands.max_logits.shape[0] > 0:
            for r in cutlass.range_constexpr(2):
                rows.largest[r] = quad_max(rows.largest[r])
