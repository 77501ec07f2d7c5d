"""Score warpgroup of the paged heads-in-M kernel: rows of a key tile that are no keys may stand
anywhere in it."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.query_norm import query_norm
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_epilogue import RowStatistics
from dsv4.kernels.attention.sm90.heads_m_score import ScoreFragments, ScoreWarpgroup
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows
from dsv4.kernels.attention.sm90.plan import HEADS, PagedHeadsMPlan
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.kit.epilogue import WARP_ROWS
from dsv4.kernels.kit.gather import WORD_BYTES, copy_word
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.reduce import quad_max, tree
from dsv4.kernels.kit.wgmma import by_row

# Stands for a factor of 0: log2 scores are then all but 0, and of a key that is none still -inf.
LEAST_SCALE = 2.0**-100
# What shared memory has of each row of a head tile.
SINKS, FACTORS, LARGEST = range(3)


class PagedRowStatistics(RowStatistics):
    """Row statistics with the largest scores, which launches without splits store, and pieces."""

    @cute.jit
    def finish(self, ctx: HeadsMContext, coord, first_row, rows: Rows, gate_offset, sinks):
        super().finish(ctx, coord, first_row, rows, gate_offset, sinks)
        max_logits = ctx.operands.max_logits
        is_first = ctx.tiling.column_slice(cute.arch.block_idx()[0]) == 0
        if coord.token < max_logits.shape[0] and is_first:
            for r in cutlass.range_constexpr(2):
                head = coord.head + first_row + 8 * r
                if cutlass.const_expr(ctx.tiling.has_pieces):
                    head = ctx.tiling.own_head(head, first_row + 8 * r, self.num_query_heads)
                if head < self.num_query_heads:
                    largest = ctx.smem.row_inputs[LARGEST, first_row + 8 * r]
                    if cutlass.const_expr(ctx.tiling.has_pieces):
                        if ctx.tiling.num_splits > 1:
                            self.combine.store_largest(ctx, coord, first_row + 8 * r, largest)
                        else:
                            max_logits[coord.token, head] = largest * LN_2
                    else:
                        max_logits[coord.token, head] = largest * LN_2


class PagedScoreWarpgroup(ScoreWarpgroup):
    """Masks keys by a bit each; rows that are no keys have been filled with zeros."""

    statistics_type = PagedRowStatistics
    is_paged = True

    def __init__(self, config: PagedFmhaConfig, plan: PagedHeadsMPlan, combine: HeadsMCombine):
        super().__init__(config, plan, combine)
        self.norm = query_norm(config)

    def _make_rows(self) -> Rows:
        return Rows.make()._replace(scale=cute.make_rmem_tensor(2, cutlass.Float32))

    def _ask_for_sinks(self, ctx: HeadsMContext, f: ScoreFragments, head) -> None:
        """They come with the factors of the scores."""

    def _sinks(self, ctx: HeadsMContext, f: ScoreFragments, sinks):
        return [ctx.smem.row_inputs[SINKS, f.row + 8 * r] for r in range(2)]

    @cute.jit
    def _load_scales(self, ctx: HeadsMContext, f: ScoreFragments, coord):
        """Ask for the factors of the scores of the thread's rows, and for their sinks, in shared
        memory: no register is free for them. Zeros for padding."""
        q_factor, inputs = ctx.operands.q_factor, ctx.smem.row_inputs
        has_factor = coord.token < q_factor.shape[0]
        start = cutlass.Int32(inputs.iterator.toint()) + f.row * 4
        if f.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                head = coord.head + f.row + 8 * r
                is_head = head < self.num_query_heads
                head = cutlass.select_(is_head, head, cutlass.Int32(0))
                size = cutlass.select_(is_head, cutlass.Int32(WORD_BYTES), cutlass.Int32(0))
                sink = ctx.operands.sink_logits.iterator.toint() + head * cutlass.Int64(4)
                copy_word(start, sink, size, (SINKS * HEADS + 8 * r) * 4)
                if cutlass.const_expr(self.norm is not None):
                    pass
                elif has_factor:
                    factor = q_factor[coord.token, None].iterator.toint() + head * cutlass.Int64(4)
                    copy_word(start, factor, size, (FACTORS * HEADS + 8 * r) * 4)
                else:
                    inputs[FACTORS, f.row + 8 * r] = cutlass.Float32(1.0)
                inputs[LARGEST, f.row + 8 * r] = -cutlass.Float32.inf
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.norm is not None):
            self._norm_rows(ctx, f, coord)

    @cute.jit
    def _norm_rows(self, ctx: HeadsMContext, f: ScoreFragments, coord):
        """Factors of the warp's rows, eight lanes each: keys and queries are on their way
        meanwhile."""
        squares, inputs = ctx.operands.q_factor, ctx.smem.row_inputs
        first = f.thread // 32 * WARP_ROWS
        rows = [first + 4 * i + f.lane // 8 for i in range(WARP_ROWS // 4)]
        # Rows of padding take the factor of the first head.
        heads = [coord.head + row for row in rows]
        heads = [
            cutlass.select_(head < self.num_query_heads, head, cutlass.Int32(0)) for head in heads
        ]
        factors = cute.make_rmem_tensor(len(rows), cutlass.Float32)
        factors.fill(1.0)
        if coord.token < squares.shape[0]:
            found = self.norm.of_lanes(squares, coord.token, heads, f.lane % 8, 1)
            for i in cutlass.range_constexpr(len(rows)):
                factors[i] = found[i]
        if f.lane % 8 == 0:
            for i in cutlass.range_constexpr(len(rows)):
                inputs[FACTORS, rows[i]] = factors[i]

    def _await_scales(self, ctx: HeadsMContext, f: ScoreFragments) -> None:
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    def _tile_info(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor):
        """Two words of a bit for each key, and whether they are of the window."""
        words = cute.make_rmem_tensor(TILE_INFO_WORDS, cutlass.Int32)
        start = ctx.smem.tile_info.iterator + kv.stage * TILE_INFO_WORDS
        start = cute.make_ptr(cutlass.Int32, start.toint(), start.memspace, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(TILE_INFO_WORDS)), words)
        for r in range(2):
            f.rows.scale[r] = ctx.smem.row_inputs[FACTORS, f.row + 8 * r] * self.scale_log2
        return words[0], words[1], words[2]

    @cute.jit
    def _mask(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor, tile_info):
        if cute.arch.fmin(f.rows.scale[0], f.rows.scale[1]) <= 0.0:
            self._make_scales_positive(f)
        if tile_info[0] & tile_info[1] != -1:
            s = by_row(f.s)
            words = [word >> f.lane % 4 * 2 for word in tile_info[:2]]
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    is_key = words[j * 8 // 32] & 1 << j * 8 % 32 + c != 0
                    for r in cutlass.range_constexpr(2):
                        s[r, c, j] = cutlass.select_(is_key, s[r, c, j], -cutlass.Float32.inf)
        if ctx.operands.max_logits.shape[0] > 0:
            self._keep_largest(ctx, f)
        return tile_info[2] != 0

    @cute.jit
    def _make_scales_positive(self, f: ScoreFragments):
        """Give the scores the signs of their factors: the softmax takes its maxima before it
        multiplies, and -inf is to stay what it is."""
        s = by_row(f.s)
        for r in cutlass.range_constexpr(2):
            scale = f.rows.scale[r]
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    s[r, c, j] = cutlass.select_(scale < 0.0, -s[r, c, j], s[r, c, j])
            f.rows.scale[r] = positive_scale(scale)

    @cute.jit
    def _keep_largest(self, ctx: HeadsMContext, f: ScoreFragments):
        """The largest score of each row so far, where it is asked for."""
        s, inputs = by_row(f.s), ctx.smem.row_inputs
        columns = [(c, j) for j in range(cute.size(s, mode=[2])) for c in range(2)]
        for r in cutlass.range_constexpr(2):
            scores = [s[r, c, j] * f.rows.scale[r] for c, j in columns]
            largest = quad_max(tree(cute.arch.fmax, scores))
            if f.lane % 4 == 0:
                row = f.row + 8 * r
                inputs[LARGEST, row] = cute.arch.fmax(inputs[LARGEST, row], largest)


def positive_scale(scale):
    """Size of a scale, and of NaN itself."""
    size = cutlass.select_(scale < 0.0, -scale, scale)
    return cutlass.select_(size < LEAST_SCALE, cutlass.Float32(LEAST_SCALE), size)
