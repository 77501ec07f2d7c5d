"""Split-KV combine of the heads-in-M kernel whose rows become e4m3 codes of two terms
(`row_codes`)."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm90.heads_m_combine import (
    HeadsMCombine,
    OutputWarp,
    add_splits,
    hold_back,
    zero_after,
)
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.plan import HeadsMPlan
from dsv4.kernels.attention.sm90.row_codes import GROUP_PAIRS, store_group_codes
from dsv4.kernels.attention.split_kv import SCALED_GROUPS, combine_sizes
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.wgmma import by_row

# 16-bit values of a thread that are under way together: of 128 columns of four splits.
MOST_VALUES = 256


class CodesCombine(HeadsMCombine):
    """Combine whose warps have 16 rows of a whole group of a scale, 128 columns, at a time.

    Rows of more splits than `MOST_SCALED_SPLITS` stay bf16.
    """

    def __init__(self, config: FmhaConfig, plan: HeadsMPlan):
        super().__init__(config, plan)
        self.sizes = combine_sizes(self.column_groups, is_scaled=True)

    @cute.jit
    def _combine(
        self,
        ctx: HeadsMContext,
        coord,
        subtile,
        w: OutputWarp,
        groups: cutlass.Constexpr,
        most_splits: cutlass.Constexpr,
    ):
        if cutlass.const_expr(groups == SCALED_GROUPS):
            self._combine_groups(ctx, coord, subtile, w, most_splits)
        else:
            super()._combine(ctx, coord, subtile, w, groups, most_splits)

    @cute.jit
    def _combine_groups(
        self, ctx: HeadsMContext, coord, subtile, w: OutputWarp, most_splits: cutlass.Constexpr
    ):
        """Combine every so many-th sub-tile of a head tile: 16 rows of a group of a scale."""
        tiling, lane = ctx.tiling, w.lane
        # Fragments of 16 columns, and turns of as many as are under way together.
        fragments = SCALED_GROUPS // 2
        turns = max(8 * fragments * most_splits // MOST_VALUES, 1)
        size = fragments // turns
        subtiles = tiling.tile_heads >> 4 << tiling.combine_shift
        while subtile.index < subtiles:
            head = coord.head + subtile.row + lane // 4
            first_group = coord.column_group + w.half * tiling.of_slice(self.column_groups)
            block = (first_group + subtile.column_group) // SCALED_GROUPS
            values = cute.make_rmem_tensor((8, size, most_splits), cutlass.Float16)
            sinks = self._load_sinks(ctx.operands.sink_logits, head)
            stats, scales = self._load_statistics(ctx, coord, subtile, lane, most_splits)
            acc = cute.make_rmem_tensor((8, size), cutlass.Float32)
            words = cute.make_rmem_tensor((GROUP_PAIRS, 2), cutlass.Uint32)
            part, factors = subtile, (0, 0)
            for turn in cutlass.range_constexpr(turns):
                self._load_accumulators(ctx, coord, part, lane, values, most_splits)
                if cutlass.const_expr(turn == 0):
                    no_bits = zero_after(values, tiling.tile_heads >> 16)
                    factors, _, _ = self._split_weights(stats, scales, sinks)
                    hold_back(stats, no_bits)
                add_splits(acc, stats, values, lane)
                rows = by_row(acc)
                for r in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(2 * size):
                        low, high = rows[r, 0, j] * factors[r], rows[r, 1, j] * factors[r]
                        words[turn * 2 * size + j, r] = quant.pack_bf16(low, high)
                start = self._fragment_offset(tiling, size)
                part = part._replace(accumulators=part.accumulators + start)
            for r in cutlass.range_constexpr(2):
                pairs = [words[j, r] for j in range(GROUP_PAIRS)]
                store_group_codes(
                    *(ctx.operands.rounded, coord.token, head + 8 * r, block, pairs),
                    *(self.num_query_heads, self.head_dim),
                )
            subtile = self._next_subtile(tiling, w.half, subtile, subtiles)
