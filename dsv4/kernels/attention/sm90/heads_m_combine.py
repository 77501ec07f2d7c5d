"""Split-KV combine of the heads-in-M kernel: the CTAs that hold the splits of a head tile reduce
its partial rows, a slice each.

Every split of a group (token, head tile, slice of its columns) writes its accumulators in 16 bits
(`partials`) and its row statistics to the workspace, waits at the group's semaphore, and then
combines its slice of the rows, always in split order: the result does not depend on which CTA
combines what.

Workspace (`SplitKv`; `counter_words` says where the groups begin):

    counters  [group][half] 64 bits, 0 before the first launch
    groups    [group] of
        accumulators  [half][16 rows][16 columns][split][lane][8] fp16, as their threads hold them
        statistics    [split][row][row max, row sum] fp32
        scales        [sub-tile of the columns][split][row] fp32
        largest       [split][row] fp32, where splits are pieces: scores
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sink_merge import output_scale, row_lse
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_tiling import HeadsMTiling
from dsv4.kernels.attention.sm90.named_barriers import HeadsMBarrier
from dsv4.kernels.attention.sm90.partials import store_subtile
from dsv4.kernels.attention.sm90.plan import HeadsMPlan
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.attention.split_kv import (
    FRAGMENT_WORDS,
    GROUP_COUNTER_WORDS,
    LANE_WORDS,
    MAX_SPLITS,
    SPLIT_STATS,
    SplitKv,
    combine_sizes,
)
from dsv4.kernels.attention.split_reduce import split_weights
from dsv4.kernels.kit.epilogue import store_rows
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.reduce import quad_max, quad_sum
from dsv4.kernels.kit.semaphore import COUNTER_WORDS, Semaphore


class SplitCoord(NamedTuple):
    """A split of a head tile of a token, and its group's part of the workspace."""

    token: cutlass.Int32
    head: cutlass.Int32  # first of the tile
    split: cutlass.Int32
    column_group: cutlass.Int32  # first of the slice
    group: cutlass.Int32
    start: cutlass.Int64  # of the group, in words


class SubTile(NamedTuple):
    """Unit of a warp's combine: 16 rows of some columns. Offsets are words of the group's
    part of the workspace, of split 0 and the warp's first lane."""

    index: cutlass.Int32  # among those of a half
    row: cutlass.Int32  # first of the head tile
    column_group: cutlass.Int32  # first of the half
    accumulators: cutlass.Int32
    statistics: cutlass.Int32
    scales: cutlass.Int32


@dataclass(frozen=True)
class OutputWarp:
    """A warp of the output warpgroups, as the combine sees it."""

    half: cutlass.Int32  # of its warpgroup
    warp: cutlass.Int32  # in its warpgroup
    lane: cutlass.Int32


class HeadsMCombine:
    """Partial rows of one kernel configuration: how they are stored, and how they are combined.

    Args:
        has_largest: whether the largest scores may be asked for, too.

    Attributes:
        lane_rows: rows of a lane while it combines.
        lane_words: of a lane, side by side, of a fragment; half of them are those of one row.
        row_step: words from there to its other row, where that lies apart.
    """

    lane_rows, lane_words, row_step = 2, LANE_WORDS, 0

    def __init__(self, config: FmhaConfig, plan: HeadsMPlan, has_largest: bool = False):
        self.has_largest = has_largest
        self.head_dim = config.head_dim
        self.num_query_heads = config.num_query_heads
        self.is_softmax_sink = config.sink_mode == "softmax"
        self.half_dim = plan.half_dim
        self.column_groups = self.half_dim // 8
        # Columns of an accumulator sub-tile, each of which has scales of its own.
        self.pv_dim = plan.pv_dim
        self.subtile_shift = (plan.pv_dim // 8).bit_length() - 1  # of 8-column groups to sub-tiles
        self.column_tiles = self.head_dim // plan.pv_dim
        self.sizes = combine_sizes(self.column_groups)

    @cute.jit
    def coord(self, tiling: HeadsMTiling, index: cutlass.Int32):
        """The split that a work tile computes."""
        # `make_warp_uniform` (a shuffle) pins these divisions here; the compiler would sink them
        # to where they are waited for.
        uniform = cute.arch.make_warp_uniform
        head_tile, split, token = (uniform(x) for x in tiling.coordinates(index))
        column_slice = uniform(tiling.column_slice(index))
        group = (token * tiling.head_tiles + head_tile) * tiling.column_slices + column_slice
        # Words of one split of a group.
        size = self._layout(tiling).split_words(self.column_tiles + self.has_largest)
        start = tiling.counters + cutlass.Int64(group) * (size * tiling.num_splits)
        head, column_group = head_tile * tiling.tile_heads, column_slice * self.column_groups
        return SplitCoord(token, head, split, column_group, group, start)

    def semaphore(self, ctx: HeadsMContext, coord: SplitCoord, half, thread) -> Semaphore:
        """That of an output warpgroup: halves of a group wait each for their own splits."""
        return Semaphore(
            workspace=ctx.operands.workspace.iterator,
            offset=coord.group * GROUP_COUNTER_WORDS + half * COUNTER_WORDS,
            split=coord.split,
            num_splits=ctx.tiling.num_splits,
            barrier=HeadsMBarrier.COMBINE + half,
            thread=thread,
        )

    # ---- one split's part ----

    @cute.jit
    def store_statistics(self, ctx: HeadsMContext, coord, row, row_max, row_sum):
        """Store the statistics of a row."""
        stats = cute.make_rmem_tensor(SPLIT_STATS, cutlass.Float32)
        stats[0], stats[1] = row_max, row_sum
        offset = self._layout(ctx.tiling).statistics_by_split(row, coord.split)
        target = self._pointer(ctx, coord, offset, cutlass.Float32, 8)
        cute.autovec_copy(stats, cute.make_tensor(target, stats.layout))

    @cute.jit
    def store_largest(self, ctx: HeadsMContext, coord, row, largest):
        """Store the largest score of a row, log2."""
        offset = self._layout(ctx.tiling).scale(self.column_tiles, row, coord.split)
        self._pointer(ctx, coord, offset, cutlass.Float32, 4)[0] = largest

    @cute.jit
    def warp_offset(self, tiling, coord, half, warp):
        """Where a warp stores its accumulators, in words of the group's part of the workspace; to
        be computed before the products, not between the last one and the rows."""
        offset = self._fragment(tiling, half, warp, 0) + coord.split * FRAGMENT_WORDS
        return cute.arch.make_warp_uniform(offset)

    @cute.jit
    def store_accumulators(self, ctx: HeadsMContext, coord, warp_offset, subtiles, w: OutputWarp):
        """Store a warp's 16 rows of half of the columns, given in accumulator sub-tiles; these may
        be changed. `warp_offset` is what the method of this name says."""
        if w.warp * 16 < ctx.tiling.tile_heads:
            offset = warp_offset + w.lane * self.lane_words
            start = self._pointer(ctx, coord, offset, cutlass.Float32, 4 * self.lane_words)
            # `make_warp_uniform` pins this: the compiler would take the products with it out of
            # the loop over work tiles, and spill them.
            step = cute.arch.make_warp_uniform(ctx.tiling.num_splits * FRAGMENT_WORDS)
            scales = cute.make_rmem_tensor(2, cutlass.Float32)
            for i, subtile in enumerate(subtiles):
                if ctx.tiling.has_subtile(i):
                    first = i * (self.pv_dim // 16) * step
                    store_subtile(subtile, start + first, step, scales, self.row_step)
                    if w.lane % 4 == 0:
                        row, column_tile = w.warp * 16 + w.lane // 4, w.half * len(subtiles) + i
                        offset = self._layout(ctx.tiling).scale(column_tile, row, coord.split)
                        target = self._pointer(ctx, coord, offset, cutlass.Float32, 4)
                        for r in cutlass.range_constexpr(2):
                            target[8 * r] = scales[r]

    # ---- combine ----

    @cute.jit
    def first_subtile(self, tiling, half, combine_slice, warp):
        """The first sub-tile of a slice that a warp combines.

        The sub-tiles of a head tile are dealt out: no CTA gets a second one before all have one.
        Warps of the same number share an SM quarter: the halves begin with different ones.
        """
        index = combine_slice + (warp + 2 * half) % 4 * tiling.num_splits
        return self._subtile(tiling, half, index)

    @cute.jit
    def _subtile(self, tiling, half, index):
        # `make_warp_uniform` pins this arithmetic before the wait at the semaphore; the compiler
        # would sink it.
        uniform = cute.arch.make_warp_uniform
        block = index >> tiling.combine_shift
        column_group = (index - (block << tiling.combine_shift)) * tiling.combine_groups
        column_tile = half * (self.half_dim // self.pv_dim) + (column_group >> self.subtile_shift)
        layout = self._layout(tiling)
        return SubTile(
            uniform(index),
            uniform(block * 16),
            uniform(column_group),
            uniform(self._fragment(tiling, half, block, column_group >> 1)),
            uniform(layout.statistics_by_split(block * 16, 0)),
            uniform(layout.scale(column_tile, block * 16, 0)),
        )

    @cute.jit
    def combine(self, ctx: HeadsMContext, coord, slices, own_subtile: SubTile, w: OutputWarp):
        """Combine slices, given as bits, of half of a head tile's columns; a warpgroup calls this.

        Args:
            own_subtile: the first one of this CTA's own slice that the warp combines.
        """
        while slices != 0:
            combine_slice = cute.arch.popc(~slices & (slices - 1))
            slices &= slices - 1
            first = own_subtile
            if combine_slice != coord.split:
                first = self.first_subtile(ctx.tiling, w.half, combine_slice, w.warp)
            for i, (groups, most, _) in enumerate(self.sizes):
                if ctx.tiling.combine_size == i:
                    self._combine(ctx, coord, first, w, groups, most)

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
        """Combine every so many-th sub-tile of a head tile: 16 rows of `groups` 8-column groups."""
        tiling, operands, lane = ctx.tiling, ctx.operands, w.lane
        lse = operands.lse
        subtiles = tiling.tile_heads >> 4 << tiling.combine_shift
        while subtile.index < subtiles:
            row = subtile.row + lane // 4
            # A visible multiple of 8, as wide stores need.
            first_group = coord.column_group + w.half * ctx.tiling.of_slice(self.column_groups)
            column = (first_group + subtile.column_group) * 8

            # ---- loads, all under way together ----
            values = cute.make_rmem_tensor((8, groups // 2, most_splits), cutlass.Float16)
            sinks = self._load_sinks(operands.sink_logits, coord.head + row)
            stats, scales = self._load_statistics(ctx, coord, subtile, lane, most_splits)
            self._load_accumulators(ctx, coord, subtile, lane, values, most_splits)
            no_bits = cutlass.Int32(0)
            # Of many splits, some may well be waited for before the last ones are asked for.
            if cutlass.const_expr(most_splits <= 12):
                no_bits = zero_after(values, tiling.tile_heads >> 16)
            factors, row_max, row_sum = self._split_weights(stats, scales, sinks)
            hold_back(stats, no_bits)

            # ---- rows, in split order ----
            acc = cute.make_rmem_tensor((8, groups // 2), cutlass.Float32)
            _add_splits(acc, stats, values, lane)
            head = coord.head + row
            place = (coord.token, head, column, lane, self.num_query_heads)
            store_rows(acc, operands.o, factors, *place)
            if coord.token < lse.shape[0] and column == 0 and lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    if head + 8 * r < self.num_query_heads:
                        lse[coord.token, head + 8 * r] = row_lse(
                            row_max[r], row_sum[r], ctx.smem.row_scale[row + 8 * r]
                        )
            if cutlass.const_expr(self.has_largest):  # noqa: SIM102 static, then dynamic
                if coord.token < operands.max_logits.shape[0] and column == 0 and lane % 4 == 0:
                    self._combine_largest(ctx, coord, row)
            subtile = self._next_subtile(tiling, w.half, subtile, subtiles)

    @cute.jit
    def _next_subtile(self, tiling, half, subtile: SubTile, subtiles):
        """The sub-tile that a warp combines behind this one, if its index is among them."""
        index = subtile.index + tiling.num_splits * 4
        # Most warps have one sub-tile: the address arithmetic of another would delay their end.
        if index < subtiles:
            subtile = self._subtile(tiling, half, index)
        else:
            subtile = subtile._replace(index=index)
        return subtile

    @cute.jit
    def _load_sinks(self, sink_logits, head):
        """Sinks of a thread's rows, from `head` on, where they are part of the softmax."""
        sinks = cute.make_rmem_tensor(self.lane_rows, cutlass.Float32)
        sinks.fill(0.0)
        for r in cutlass.range_constexpr(self.lane_rows):
            if cutlass.const_expr(self.is_softmax_sink):  # noqa: SIM102 static, then dynamic
                if head + 8 * r < self.num_query_heads:
                    sinks[r] = sink_logits[head + 8 * r]
        return sinks

    @cute.jit
    def _combine_largest(self, ctx: HeadsMContext, coord, first_row):
        """Write the largest scores of a thread's rows."""
        tiling, max_logits = ctx.tiling, ctx.operands.max_logits
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            if coord.head + row < self.num_query_heads:
                offset = self._layout(tiling).scale(self.column_tiles, row, 0)
                source = self._pointer(ctx, coord, offset, cutlass.Float32, 4)
                largest = -cutlass.Float32.inf
                for split in cutlass.range(tiling.num_splits, unroll=1):
                    largest = cute.arch.fmax(largest, source[split * tiling.tile_heads])
                max_logits[coord.token, coord.head + row] = largest * LN_2

    @cute.jit
    def _load_accumulators(
        self, ctx, coord, subtile, lane, values: cute.Tensor, most_splits: cutlass.Constexpr
    ):
        """Load a sub-tile's [8, 16-column fragment, split] accumulators; 0 past the last split."""
        values.fill(0.0)
        num_splits = ctx.tiling.num_splits
        layout = cute.make_layout((8, MAX_SPLITS), stride=(1, 2 * FRAGMENT_WORDS))
        for g in cutlass.range_constexpr(cute.size(values, mode=[1])):
            offset = subtile.accumulators + g * num_splits * FRAGMENT_WORDS + lane * LANE_WORDS
            rows = self._pointer(ctx, coord, offset, cutlass.Float16)
            rows = cute.make_tensor(rows, layout)
            for s in cutlass.range_constexpr(most_splits):
                if s < num_splits:
                    cute.autovec_copy(rows[None, s], values[None, g, s])

    @cute.jit
    def _load_statistics(self, ctx, coord, subtile, lane, most_splits: cutlass.Constexpr):
        """Statistics [2, splits / 4, row] of every fourth split of a thread's rows, and the scales
        [splits / 4, row] of a sub-tile of their columns."""
        own_splits = cutlass.const_expr(-(-most_splits // 4))  # of a lane
        stats = cute.make_rmem_tensor((SPLIT_STATS, own_splits, self.lane_rows), cutlass.Float32)
        scales = cute.make_rmem_tensor((own_splits, self.lane_rows), cutlass.Float32)
        scales.fill(0.0)
        tile_heads, num_splits = ctx.tiling.tile_heads, ctx.tiling.num_splits
        first, step = lane % 4, 4 * tile_heads
        row = first * tile_heads + lane // 4
        offset = subtile.statistics + row * SPLIT_STATS
        source = self._pointer(ctx, coord, offset, cutlass.Float32, 8)
        source_scales = self._pointer(ctx, coord, subtile.scales + row, cutlass.Float32, 4)
        for i in cutlass.range_constexpr(own_splits):
            from_stats = pointer_at(source, i * SPLIT_STATS * step, cutlass.Float32, 8)
            from_scales = source_scales + i * step
            for r in cutlass.range_constexpr(self.lane_rows):
                stats[0, i, r], stats[1, i, r] = -cutlass.Float32.inf, cutlass.Float32(0.0)
                if i * 4 + first < num_splits:
                    pair = cute.make_tensor(
                        from_stats + 8 * r * SPLIT_STATS, cute.make_layout(SPLIT_STATS)
                    )
                    cute.autovec_copy(pair, stats[None, i, r])
                    scales[i, r] = from_scales[8 * r]
        return stats, scales

    def _split_weights(self, stats: cute.Tensor, scales: cute.Tensor, sinks: cute.Tensor):
        """Replace the row maxima [0, splits / 4, row] by what stored values are to be multiplied
        by; returns the output scale, the row max and the row sum of each row."""
        factors, row_maxima, row_sums = [], [], []
        for r in range(self.lane_rows):
            row_max, row_sum = split_weights(
                stats[None, None, r], quad_max, quad_sum, scales[None, r]
            )
            row_maxima.append(row_max)
            row_sums.append(row_sum)
            factors.append(output_scale(row_max, row_sum, sinks[r], self.is_softmax_sink))
        return factors, row_maxima, row_sums

    # ---- a group's part of the workspace ----

    def _layout(self, tiling: HeadsMTiling) -> SplitKv:
        """Of a group; two values share a word."""
        row_words = tiling.of_slice(self.head_dim // 2)
        return SplitKv(tiling.num_splits, tiling.tile_heads, row_words)

    def _fragment(self, tiling: HeadsMTiling, half, block, fragment):
        """Accumulators of split 0 of 16 rows and 16 columns."""
        blocks = half * (tiling.tile_heads >> 4) + block
        fragments = tiling.of_slice(self.column_groups // 2)
        return self._layout(tiling).fragment(blocks * fragments + fragment)

    def _pointer(self, ctx, coord, offset, dtype, align: int = 16) -> cute.Pointer:
        return pointer_at(ctx.operands.workspace.iterator, coord.start + offset, dtype, align)


@cute.jit
def _add_splits(acc: cute.Tensor, weights: cute.Tensor, values: cute.Tensor, lane):
    """acc [8, fragment] = the weighted sum of a sub-tile's splits, in their order.

    Args:
        weights: [0, splits / 4, row] of every fourth split of a thread's two rows.
        values: [8, fragment, split].
    """
    acc.fill(0.0)
    for s in cutlass.range_constexpr(cute.size(values, mode=[2])):
        for r in cutlass.range_constexpr(2):
            weight = cute.arch.shuffle_sync(weights[0, s // 4, r], lane // 4 * 4 + s % 4)
            for g in cutlass.range_constexpr(cute.size(values, mode=[1])):
                for i in (2 * r, 2 * r + 1, 2 * r + 4, 2 * r + 5):
                    acc[i, g] += weight * values[i, g, s].to(cutlass.Float32)


def hold_back(weights: cute.Tensor, no_bits):
    """Let what uses the weights [2, splits / 4, row] come after all loads, which `no_bits` follows;
    the weights themselves are computed meanwhile."""
    words = cute.recast_tensor(weights, cutlass.Int32)
    for i in range(cute.size(weights, mode=[1])):
        for r in range(cute.size(weights, mode=[2])):
            words[0, i, r] |= no_bits


def zero_after(values: cute.Tensor, zero):
    """0, as `zero` is, once values [8, groups, splits] are loaded.

    The compiler would load some splits, use them, and load the next: a memory latency each time.
    What depends on a 0 that it cannot know comes after all loads.
    """
    words, bits = cute.recast_tensor(values, cutlass.Int32), cutlass.Int32(0)
    for group in range(cute.size(words, mode=[1])):
        for split in range(cute.size(words, mode=[2])):
            bits |= words[0, group, split]
    return bits & zero
