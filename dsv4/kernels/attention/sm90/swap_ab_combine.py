"""Split-KV combine of the swap-AB kernel: the CTAs that hold the splits of a head tile reduce its
transposed partial rows, a slice each.

Every split writes its accumulators and statistics to the workspace, waits at the head tile's
semaphore, and combines its slice of the fragments, always in split order (splits that are a
cluster leave them in its shared memory: `swap_ab_cluster`). A group of the workspace is a head
tile's:

    accumulators  [8 heads][16 columns][split][lane][4] fp32, as their threads hold them
    statistics    [head][split][row max, row sum] fp32
    largest       [split][head] fp32, where splits are pieces: scores

In fp32, other than those of heads in M: a tile of at most 24 heads leaves at most 48 KB a split.
"""

import operator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sink_merge import output_scale, row_lse
from dsv4.kernels.attention.sm90.named_barriers import SwapAbBarrier
from dsv4.kernels.attention.sm90.plan import SwapAbPlan
from dsv4.kernels.attention.sm90.sink_gate import gate_offset
from dsv4.kernels.attention.sm90.swap_ab_context import PAIR, SwapAbContext, SwapAbTiling
from dsv4.kernels.attention.sm90.swap_ab_softmax import Heads
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.attention.split_kv import (
    GROUP_COUNTER_WORDS,
    MAX_SPLITS,
    SPLIT_STATS,
    SplitKv,
    counter_words,
)
from dsv4.kernels.attention.split_reduce import split_weights
from dsv4.kernels.kit.epilogue import quad_transpose, transpose
from dsv4.kernels.kit.pointers import pointer_at, row_pointer
from dsv4.kernels.kit.reduce import across_quads
from dsv4.kernels.kit.semaphore import Semaphore

# Loads of a lane that are under way together, at most: of some fragments and splits.
MOST_LOADS = 24
MOST_FRAGMENTS = 4
FEWER_SPLITS = 20  # up to which one fragment is combined without loads for the splits beyond


def batch_sizes(fragments: int, groups: int) -> list[tuple[int, int]]:
    """How many 16-column fragments of 8 heads a warp combines at a time, and of up to how many
    splits: as few as let every warp of a tile's splits have one turn, if the registers hold what it
    loads.

    Args:
        fragments: of 8 heads.
        groups: of 8 heads, in a head tile.
    """
    sizes: dict[int, int] = {}
    for splits in range(2, MAX_SPLITS + 1):
        together = 1
        while together * 4 * splits < fragments * groups:
            if 2 * together > min(fragments, MOST_FRAGMENTS) or 2 * together * splits > MOST_LOADS:
                break
            together *= 2
        sizes[together] = splits
    # One fragment of many splits is loaded in several goes.
    return sorted({*sizes.items(), (1, FEWER_SPLITS)}, key=lambda size: size[1])


class SplitCoord(NamedTuple):
    """A split of a head tile, and its group's part of the workspace."""

    token: cutlass.Int32
    head: cutlass.Int32  # first one of the tile
    split: cutlass.Int32
    group: cutlass.Int32
    start: cutlass.Int64  # in words


@dataclass(frozen=True)
class MathWarp:
    """A warp of the math warpgroup, as the combine sees it."""

    warp: cutlass.Int32
    lane: cutlass.Int32


class SwapAbCombine:
    """Partial rows of one kernel configuration: how they are stored, and how they are combined.

    Args:
        has_largest: whether the largest scores may be asked for, too.
    """

    def __init__(self, config: FmhaConfig, plan: SwapAbPlan, has_largest: bool = False):
        self.has_largest = has_largest
        self.head_dim = plan.head_dim
        self.tile_heads = plan.tile_heads
        self.is_softmax_sink = config.sink_mode == "softmax"
        self.fragments = plan.head_dim // 16  # of 8 heads
        self.batches = batch_sizes(self.fragments, plan.tile_heads // 8)

    @cute.jit
    def coord(self, workspace: cute.Tensor, tiling: SwapAbTiling, index: cutlass.Int32):
        """The split that a work tile computes."""
        head, split, token = tiling.coordinates(index)
        group = token * tiling.head_tiles + head // tiling.tile_heads
        size = self._layout(tiling).split_words(int(self.has_largest)) * tiling.num_splits
        start = counter_words(workspace.shape[0]) + cutlass.Int64(group) * size
        return SplitCoord(token, head, split, group, start)

    def semaphore(self, ctx: SwapAbContext, coord: SplitCoord, thread) -> Semaphore:
        """That of a head tile."""
        return Semaphore(
            workspace=ctx.operands.workspace.iterator,
            offset=coord.group * GROUP_COUNTER_WORDS,
            split=coord.split,
            num_splits=ctx.tiling.num_splits,
            barrier=int(SwapAbBarrier.COMBINE),
            thread=thread,
        )

    @cute.jit
    def store_accumulators(self, ctx: SwapAbContext, coord, acc: cute.Tensor, w: MathWarp):
        """Store a warp's part of the accumulators [4, 8 heads, 64-column chunk]."""
        for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for t in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                fragment = j * self.fragments + t * 4 + w.warp
                target = self._own_accumulators(ctx, coord, fragment)
                cute.autovec_copy(acc[None, j, t], target[None, w.lane])

    @cute.jit
    def store_statistics(self, ctx: SwapAbContext, coord, heads: Heads, w: MathWarp):
        """Store the heads' statistics, whose sums are over all keys; the first warp does."""
        if w.warp == 0 and w.lane < 4:
            for c, j in heads.columns():
                stats = cute.make_rmem_tensor(SPLIT_STATS, cutlass.Float32)
                stats[0], stats[1] = heads.row_max[c, j], heads.row_sum[c, j]
                row = self._own_statistics(ctx, coord, 8 * j + 2 * w.lane + c)
                cute.autovec_copy(stats, row)

    @cute.jit
    def store_largest(self, ctx: SwapAbContext, coord, head, largest):
        """Store the largest score of a head of the tile, log2."""
        self._largest(ctx, coord, head)[coord.split * self.tile_heads] = largest

    @cute.jit
    def combine(self, ctx: SwapAbContext, coord, slices, w: MathWarp, has_both):
        """Combine slices, given as bits; a warpgroup calls this."""
        while slices != 0:
            combine_slice = cute.arch.popc(~slices & (slices - 1))
            slices &= slices - 1
            self._combine_slice(ctx, coord, combine_slice, w, has_both)

    @cute.jit
    def _combine_slice(self, ctx: SwapAbContext, coord, combine_slice, w: MathWarp, has_both):
        """Combine a warp's part of a slice."""
        first = combine_slice * 4 + w.warp
        fewer = 1
        for together, splits in self.batches:
            if ctx.tiling.num_splits > fewer and ctx.tiling.num_splits <= splits:
                self._combine(ctx, coord, first, w.lane, has_both, together, splits)
            fewer = splits

    @cute.jit
    def _combine(
        self,
        ctx: SwapAbContext,
        coord,
        first,
        lane,
        has_both,
        together: cutlass.Constexpr,
        most_splits: cutlass.Constexpr,
    ):
        """Combine every so many-th batch of neighbouring fragments."""
        operands, num_splits, lse = ctx.operands, ctx.tiling.num_splits, ctx.operands.lse
        batches = self.fragments // together
        batch, end = cutlass.Int32(first), self.tile_heads // 8 * batches
        self._leave(batch >= end)
        while batch < end:
            fragment = batch % batches * together
            first_head = batch // batches * 8
            head = first_head + lane % 4 * 2

            # ---- loads, all under way together ----
            sinks = cute.make_rmem_tensor(PAIR, cutlass.Float32)
            stats = cute.make_rmem_tensor(
                (SPLIT_STATS, -(-most_splits // 8), PAIR), cutlass.Float32
            )
            for c in cutlass.range_constexpr(PAIR):
                sinks[c] = self._sink(ctx, coord.head + head + c)
                for i in cutlass.range_constexpr(cute.size(stats, mode=[1])):
                    # A lane computes the weight of every eighth split of its heads.
                    split = i * 8 + lane // 4
                    stats[0, i, c], stats[1, i, c] = -cutlass.Float32.inf, cutlass.Float32(0.0)
                    if split < num_splits:
                        self._load_statistics(ctx, coord, head + c, split, stats[None, i, c])
            loads = min(most_splits, MOST_LOADS // together)
            values = cute.make_rmem_tensor((4, together, loads), cutlass.Float32)
            acc = cute.make_rmem_tensor((4, together), cutlass.Float32)
            acc.fill(0.0)
            place = (ctx, coord, first_head // 8 * self.fragments + fragment, lane)
            self._load_fragments(*place, 0, values)
            scales, row_max, row_sum = self._split_weights(stats, sinks)

            # ---- heads, in split order ----
            for begin in cutlass.range_constexpr(0, most_splits, loads):
                if cutlass.const_expr(begin > 0):
                    self._load_fragments(*place, begin, values)
                for s in cutlass.range_constexpr(begin, min(begin + loads, most_splits)):
                    for c in cutlass.range_constexpr(PAIR):
                        weight = cute.arch.shuffle_sync(stats[0, s // 8, c], s % 8 * 4 + lane % 4)
                        for u in cutlass.range_constexpr(together):
                            for r in cutlass.range_constexpr(2):
                                value = values[2 * r + c, u, s - begin]
                                acc[2 * r + c, u] += weight * value
            self._leave(batch + num_splits * 4 >= end)
            out_head = coord.head + first_head
            store_fragments(acc, scales, operands.o, coord.token, out_head, fragment * 16, 16, lane)
            if coord.token < lse.shape[0] and fragment == 0 and lane < 4:
                for c in cutlass.range_constexpr(PAIR):
                    offset = gate_offset(sinks[c], has_both, not self.is_softmax_sink)
                    value = row_lse(row_max[c], row_sum[c], offset)
                    lse[coord.token, coord.head + head + c] = value
            if cutlass.const_expr(self.has_largest):  # noqa: SIM102 static, then dynamic
                if coord.token < operands.max_logits.shape[0] and fragment == 0 and lane < 4:
                    self._combine_largest(ctx, coord, head)
            batch += num_splits * 4

    @cute.jit
    def _combine_largest(self, ctx: SwapAbContext, coord, head):
        """Write the largest scores of a pair of heads of the tile."""
        max_logits = ctx.operands.max_logits
        for c in cutlass.range_constexpr(PAIR):
            source = self._largest(ctx, coord, head + c)
            largest = -cutlass.Float32.inf
            for split in cutlass.range(ctx.tiling.num_splits, unroll=1):
                largest = cute.arch.fmax(largest, source[split * self.tile_heads])
            max_logits[coord.token, coord.head + head + c] = largest * LN_2

    @cute.jit
    def _load_fragments(
        self, ctx, coord, first, lane, begin: cutlass.Constexpr, values: cute.Tensor
    ):
        """Load a lane's [4, fragment, split] accumulators from split `begin` on; 0 past the
        last."""
        values.fill(0.0)
        for u in cutlass.range_constexpr(cute.size(values, mode=[1])):
            for s in cutlass.range_constexpr(cute.size(values, mode=[2])):
                if begin + s < ctx.tiling.num_splits:
                    place = (first + u, lane, begin + s)
                    self._load_accumulators(ctx, coord, place, values[None, u, s])

    def _split_weights(self, stats: cute.Tensor, sinks: cute.Tensor):
        """Replace the row maxima [0, splits / 8, pair] by weights; returns the output scale, the
        row max and the row sum of both heads."""
        scales, row_maxima, row_sums = [], [], []
        for c in range(PAIR):
            row_max, row_sum = split_weights(
                stats[None, None, c],
                lambda x: across_quads(cute.arch.fmax, x),
                lambda x: across_quads(operator.add, x),
            )
            row_maxima.append(row_max)
            row_sums.append(row_sum)
            scales.append(output_scale(row_max, row_sum, sinks[c], self.is_softmax_sink))
        return scales, row_maxima, row_sums

    # ---- the workspace ----

    def _sink(self, ctx: SwapAbContext, head) -> cutlass.Float32:
        """That of a head."""
        return ctx.operands.sink_logits[head]

    def _own_accumulators(self, ctx: SwapAbContext, coord, fragment) -> cute.Tensor:
        """[4, lane] of a fragment of this split."""
        return self._accumulators(ctx, coord, fragment)[None, None, coord.split]

    def _own_statistics(self, ctx: SwapAbContext, coord, head) -> cute.Tensor:
        """[row max and row sum] of a head of this split."""
        return self._statistics(ctx, coord, head)[None, coord.split]

    def _load_accumulators(self, ctx, coord, place: tuple, values: cute.Tensor) -> None:
        """Load what a lane has of a fragment of a split: (fragment, lane, split)."""
        fragment, lane, split = place
        cute.autovec_copy(self._accumulators(ctx, coord, fragment)[None, lane, split], values)

    def _load_statistics(self, ctx, coord, head, split, stats: cute.Tensor) -> None:
        """Load a head's statistics of a split."""
        cute.autovec_copy(self._statistics(ctx, coord, head)[None, split], stats)

    def _leave(self, is_through) -> None:
        """What follows where a warp that is through reads no partials any more: nothing here."""

    def _layout(self, tiling: SwapAbTiling) -> SplitKv:
        return SplitKv(tiling.num_splits, self.tile_heads, self.head_dim)

    def _accumulators(self, ctx, coord, fragment) -> cute.Tensor:
        """[4, lane, split] of a fragment."""
        layout = cute.make_layout((4, 32, MAX_SPLITS))
        offset = coord.start + self._layout(ctx.tiling).fragment(fragment)
        pointer = pointer_at(ctx.operands.workspace.iterator, offset, cutlass.Float32)
        return cute.make_tensor(pointer, layout)

    def _largest(self, ctx, coord, head) -> cute.Pointer:
        """Largest score of a head in split 0; those of the next splits lie `tile_heads` apart."""
        offset = self._layout(ctx.tiling).scale(0, head, 0)
        workspace = ctx.operands.workspace.iterator
        return pointer_at(workspace, coord.start + offset, cutlass.Float32, 4)

    def _statistics(self, ctx, coord, head) -> cute.Tensor:
        """[row max and row sum, split] of a head."""
        layout = cute.make_layout((SPLIT_STATS, MAX_SPLITS))
        offset = self._layout(ctx.tiling).statistics_by_row(head)
        workspace = ctx.operands.workspace.iterator
        pointer = pointer_at(workspace, coord.start + offset, cutlass.Float32, 8)
        return cute.make_tensor(pointer, layout)


@cute.jit
def store_fragments(
    fragments: cute.Tensor, scales, o, token, head, column, stride: cutlass.Constexpr, lane
):
    """Scale, round, transpose and write 16-column fragments of 8 heads.

    Args:
        fragments: [4, fragment] accumulators, as an m16n8 fragment has them.
        scales: of the pair of heads of this thread.
        head, column: first ones; `stride` columns lie between the fragments' first ones.
    """
    count = cute.size(fragments, mode=[1])
    together = 2 if count % 2 == 0 else 1
    quad, lane_in_quad = lane // 4, lane % 4
    target = row_pointer(o, token, head + quad) + column
    for first in cutlass.range_constexpr(0, count, together):
        values = cute.make_rmem_tensor((PAIR, 2 * together), o.element_type)
        for i in cutlass.range_constexpr(2 * together):
            for c in cutlass.range_constexpr(PAIR):
                value = fragments[2 * (i % 2) + c, first + i // 2] * scales[c]
                values[c, i] = value.to(o.element_type)
        # A lane's words were of a pair of heads, at a column each; now they are of one head, at a
        # pair of columns.
        words = cute.recast_tensor(values, cutlass.Int32)
        for i in cutlass.range_constexpr(2 * together):
            words[i] = transpose(words[i])
        if cutlass.const_expr(together == 2):
            quad_transpose(words, lane_in_quad)
            start = target + (first + lane_in_quad // 2) * stride + lane_in_quad % 2 * 8
            vector = cute.make_tensor(start, cute.make_layout(8))
            cute.autovec_copy(cute.make_tensor(values.iterator, cute.make_layout(8)), vector)
        else:
            for i in cutlass.range_constexpr(2):
                start = cute.recast_ptr(target + first * stride + i * 8, dtype=cutlass.Int32)
                cute.make_tensor(start, cute.make_layout(4))[lane_in_quad] = words[i]
