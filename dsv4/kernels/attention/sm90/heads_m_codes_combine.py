"""Split-KV combine of the heads-in-M kernel whose rows become e4m3 codes of two terms
(`row_codes`).

A warp combines 8 rows of a whole group of a scale, 128 columns. So the two rows of a thread lie
apart in the workspace:

    accumulators  [half][16 rows][16 columns][split][row / 8][lane][4] fp16
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.row_codes import GROUP_PAIRS, store_group_codes
from dsv4.kernels.attention.sm90.heads_m_combine import (
    HeadsMCombine,
    OutputWarp,
    SubTile,
    hold_back,
    zero_after,
)
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.plan import HeadsMPlan
from dsv4.kernels.attention.split_kv import FRAGMENT_WORDS, LANE_WORDS, MAX_SPLITS, combine_sizes
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.kit import quant

ROWS = 8  # of a sub-tile
FRAGMENT_COLUMNS = 16
GROUP_FRAGMENTS = K_BLOCK // FRAGMENT_COLUMNS
# Fragments of splits that are under way together: all of a group of eight splits. The statistics of
# more take registers, too.
MOST_LOADS, MOST_LOADS_OF_MANY = 64, 32


class CodesCombine(HeadsMCombine):
    """Combine of rows that become codes, of any number of splits."""

    lane_rows, lane_words, row_step = 1, LANE_WORDS // 2, FRAGMENT_WORDS // 2

    def __init__(self, config: FmhaConfig, plan: HeadsMPlan):
        super().__init__(config, plan)
        self.sizes = combine_sizes(self.column_groups, is_scaled=True)

    @cute.jit
    def _subtile(self, tiling, half, index):
        uniform = cute.arch.make_warp_uniform
        block = index >> tiling.combine_shift
        column_group = (index - (block << tiling.combine_shift)) * tiling.combine_groups
        column_tile = half * (self.half_dim // self.pv_dim) + (column_group >> self.subtile_shift)
        layout = self._layout(tiling)
        accumulators = self._fragment(tiling, half, block >> 1, column_group >> 1)
        return SubTile(
            uniform(index),
            uniform(block * ROWS),
            uniform(column_group),
            uniform(accumulators + (block & 1) * self.row_step),
            uniform(layout.statistics_by_split(block * ROWS, 0)),
            uniform(layout.scale(column_tile, block * ROWS, 0)),
        )

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
        """Combine every so many-th sub-tile of a head tile: 8 rows of a group of a scale."""
        tiling, lane = ctx.tiling, w.lane
        most_loads = MOST_LOADS if most_splits <= 8 else MOST_LOADS_OF_MANY
        size = min(GROUP_FRAGMENTS, most_loads // most_splits)
        subtiles = tiling.tile_heads // ROWS << tiling.combine_shift
        while subtile.index < subtiles:
            head = coord.head + subtile.row + lane // 4
            first_group = coord.column_group + w.half * tiling.of_slice(self.column_groups)
            block = (first_group + subtile.column_group) // groups
            values = cute.make_rmem_tensor((4, size, most_splits), cutlass.Float16)
            sinks = self._load_sinks(ctx.operands.sink_logits, head)
            stats, scales = self._load_statistics(ctx, coord, subtile, lane, most_splits)
            pairs = cute.make_rmem_tensor(GROUP_PAIRS, cutlass.Uint32)
            factor = cutlass.Float32(0.0)
            for first in cutlass.range_constexpr(0, GROUP_FRAGMENTS, size):
                self._load_rows(ctx, coord, subtile, first, values)
                if cutlass.const_expr(first == 0):
                    no_bits = zero_after(values, tiling.tile_heads >> 16)
                    (factor,), _, _ = self._split_weights(stats, scales, sinks)
                    hold_back(stats, no_bits)
                acc = cute.make_rmem_tensor((4, size), cutlass.Float32)
                _add_splits(acc, stats, values, lane)
                for i in cutlass.range_constexpr(2 * size):
                    low, high = acc[i % 2 * 2, i // 2], acc[i % 2 * 2 + 1, i // 2]
                    pairs[2 * first + i] = quant.pack_bf16(low * factor, high * factor)
            store_group_codes(
                *(ctx.operands.rounded, coord.token, head, block),
                [pairs[i] for i in range(GROUP_PAIRS)],
                *(self.num_query_heads, self.head_dim),
            )
            subtile = self._next_subtile(tiling, w.half, subtile, subtiles)

    @cute.jit
    def _load_rows(
        self, ctx: HeadsMContext, coord, subtile, first: cutlass.Constexpr, values: cute.Tensor
    ):
        """Load a lane's [4, 16-column fragment, split] accumulators of a sub-tile, from fragment
        `first` on; 0 past the last split."""
        values.fill(0.0)
        num_splits = ctx.tiling.num_splits
        layout = cute.make_layout((4, MAX_SPLITS), stride=(1, 2 * FRAGMENT_WORDS))
        lane = cute.arch.lane_idx() * self.lane_words
        for g in cutlass.range_constexpr(cute.size(values, mode=[1])):
            offset = subtile.accumulators + (first + g) * num_splits * FRAGMENT_WORDS + lane
            rows = self._pointer(ctx, coord, offset, cutlass.Float16, 4 * self.lane_words)
            rows = cute.make_tensor(rows, layout)
            for s in cutlass.range_constexpr(cute.size(values, mode=[2])):
                if s < num_splits:
                    cute.autovec_copy(rows[None, s], values[None, g, s])


@cute.jit
def _add_splits(acc: cute.Tensor, weights: cute.Tensor, values: cute.Tensor, lane):
    """acc [4, fragment] = the weighted sum of a sub-tile's splits, in their order.

    Args:
        weights: [0, splits / 4, 0] of every fourth split of a thread's row.
        values: [4, fragment, split].
    """
    acc.fill(0.0)
    for s in cutlass.range_constexpr(cute.size(values, mode=[2])):
        weight = cute.arch.shuffle_sync(weights[0, s // 4, 0], lane // 4 * 4 + s % 4)
        for g in cutlass.range_constexpr(cute.size(values, mode=[1])):
            for i in cutlass.range_constexpr(4):
                acc[i, g] += weight * values[i, g, s].to(cutlass.Float32)
