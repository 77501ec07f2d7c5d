"""Split-KV of the Hopper kernel for few heads: the CTAs of a token join transposed partial rows.

Each writes its accumulators and statistics to the workspace, meets the others, and joins its share
of the units, always in split order. A group of the workspace is a head tile's:

    accumulators  [8 heads][16 columns][split][lane][4] fp32, as their threads hold them
    statistics    [head][split][reference, sum] fp32
"""

import operator
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.device import pointer_at, quad_transpose
from dsv4.kernels.attention.sm90.semaphore import Meeting, weigh_splits
from dsv4.kernels.attention.sm90.swap_ab_softmax import PAIR, Heads, over_keys
from dsv4.kernels.attention.sm100.combine import output_scale, row_lse, row_pointer
from dsv4.kernels.attention.split_kv import MAX_SPLITS, counter_words

# Loads of a lane that are under way together, at most: of some units and splits.
MOST_LOADS = 24
MOST_UNITS = 4
FEWER_SPLITS = 20  # up to which one unit is joined without loads for the splits beyond
STATS = 2  # reference and sum of a head
UNIT_WORDS = 128


def batch_sizes(units: int, groups: int) -> list[tuple[int, int]]:
    """How many 16-column units of 8 heads a warp joins at a time, and of up to how many splits: as
    few as let every warp of a tile's splits have one turn, if the registers hold what it loads.

    Args:
        units: of 8 heads.
        groups: of 8 heads, in a tile.
    """
    sizes: dict[int, int] = {}
    for splits in range(2, MAX_SPLITS + 1):
        together = 1
        while together * 4 * splits < units * groups:
            if 2 * together > min(units, MOST_UNITS) or 2 * together * splits > MOST_LOADS:
                break
            together *= 2
        sizes[together] = splits
    # One unit of many splits is loaded in several goes.
    return sorted({*sizes.items(), (1, FEWER_SPLITS)}, key=lambda size: size[1])


class HeadTiling(NamedTuple):
    """How work items map to head tiles, splits and tokens."""

    num_splits: cutlass.Int32
    works: cutlass.Int32
    tile_heads: int
    head_tiles: int  # of a token
    by_splits: cute.FastDivmodDivisorV2

    def coordinates(self, index):
        """First head, split and token of a work item; head tiles with the same keys are
        neighbours."""
        token, split = divmod(index // self.head_tiles, self.by_splits)
        head = index % self.head_tiles * self.tile_heads
        return cutlass.Int32(head), cutlass.Int32(split), cutlass.Int32(token)


class Member(NamedTuple):
    """A split of a head tile, and its group's part of the workspace."""

    token: cutlass.Int32
    head: cutlass.Int32  # first one of the tile
    split: cutlass.Int32
    group: cutlass.Int32
    start: cutlass.Int64  # in words


class FewHeadsJoin(Meeting):
    """Partial rows of one kernel configuration: how they are left, and how they are joined."""

    def __init__(self, head_dim: int, tile_heads: int, sink_mode: str):
        self.head_dim = head_dim
        self.tile_heads = tile_heads
        self.is_softmax_sink = sink_mode == "softmax"
        self.units = head_dim // 16  # of 8 heads
        self.batches = batch_sizes(self.units, tile_heads // 8)

    @cute.jit
    def member(self, workspace: cute.Tensor, tiling: HeadTiling, index: cutlass.Int32):
        head, split, token = tiling.coordinates(index)
        group = token * tiling.head_tiles + head // tiling.tile_heads
        size = self.tile_heads * (self.head_dim + STATS) * tiling.num_splits
        start = counter_words(workspace.shape[0]) + cutlass.Int64(group) * size
        return Member(token, head, split, group, start)

    @cute.jit
    def store_accumulators(self, acc, workspace, tiling, member, warp, lane):
        """Leave a warp's part of the accumulators [4, 8 heads, 64-column tile]."""
        for j in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for t in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                unit = j * self.units + t * 4 + warp
                target = self._accumulators(workspace, tiling, member, unit)
                cute.autovec_copy(acc[None, j, t], target[None, lane, member.split])

    @cute.jit
    def store_statistics(self, heads: Heads, workspace, tiling, member, warp, lane):
        """Leave the heads' statistics, whose sums are total; the first warp does."""
        if warp == 0 and lane < 4:
            for c, j in heads.columns():
                stats = cute.make_rmem_tensor(STATS, cutlass.Float32)
                stats[0], stats[1] = heads.ref[c, j], heads.sum[c, j]
                row = self._statistics(workspace, tiling, member, 8 * j + 2 * lane + c)
                cute.autovec_copy(stats, row[None, member.split])

    @cute.jit
    def join_shares(
        self, workspace, tiling, member, shares, warp, lane, has_both, sink_logits, o, lse
    ):
        """Join the shares, given as bits; a warpgroup calls this."""
        while shares != 0:
            share = cute.arch.popc(~shares & (shares - 1))
            shares &= shares - 1
            first = share * 4 + warp
            fewer = 1
            for together, splits in self.batches:
                if tiling.num_splits > fewer and tiling.num_splits <= splits:
                    self._join_units(
                        *(workspace, tiling, member, first, lane, has_both),
                        *(sink_logits, o, lse, together, splits),
                    )
                fewer = splits

    @cute.jit
    def _join_units(
        self,
        workspace,
        tiling,
        member,
        first,
        lane,
        has_both,
        sink_logits,
        o,
        lse,
        together: cutlass.Constexpr,
        most_splits: cutlass.Constexpr,
    ):
        """Join every so many-th batch of units that are neighbours."""
        batches = self.units // together
        batch = cutlass.Int32(first)
        while batch < self.tile_heads // 8 * batches:
            unit = batch % batches * together
            first_head = batch // batches * 8
            head = first_head + lane % 4 * 2

            # ---- loads, all under way together ----
            sinks = cute.make_rmem_tensor(PAIR, cutlass.Float32)
            stats = cute.make_rmem_tensor((STATS, -(-most_splits // 8), PAIR), cutlass.Float32)
            for c in cutlass.range_constexpr(PAIR):
                sinks[c] = sink_logits[member.head + head + c]
                rows = self._statistics(workspace, tiling, member, head + c)
                for i in cutlass.range_constexpr(cute.size(stats, mode=[1])):
                    # A lane weighs every eighth split of its heads.
                    split = i * 8 + lane // 4
                    stats[0, i, c], stats[1, i, c] = -cutlass.Float32.inf, cutlass.Float32(0.0)
                    if split < tiling.num_splits:
                        cute.autovec_copy(rows[None, split], stats[None, i, c])
            loads = min(most_splits, MOST_LOADS // together)
            values = cute.make_rmem_tensor((4, together, loads), cutlass.Float32)
            acc = cute.make_rmem_tensor((4, together), cutlass.Float32)
            acc.fill(0.0)
            first_unit = first_head // 8 * self.units + unit
            place = (workspace, tiling, member, first_unit, lane)
            self._load_units(*place, 0, values)
            scales, tops, totals = self._weigh_heads(stats, sinks)

            # ---- heads, in split order ----
            for begin in cutlass.range_constexpr(0, most_splits, loads):
                if cutlass.const_expr(begin > 0):
                    self._load_units(*place, begin, values)
                for s in cutlass.range_constexpr(begin, min(begin + loads, most_splits)):
                    for c in cutlass.range_constexpr(PAIR):
                        weight = cute.arch.shuffle_sync(stats[0, s // 8, c], s % 8 * 4 + lane % 4)
                        for u in cutlass.range_constexpr(together):
                            for r in cutlass.range_constexpr(2):
                                value = values[2 * r + c, u, s - begin]
                                acc[2 * r + c, u] += weight * value
            out_head = member.head + first_head
            store_units(acc, scales, o, member.token, out_head, unit * 16, 16, lane)
            if member.token < lse.shape[0] and unit == 0 and lane < 4:
                for c in cutlass.range_constexpr(PAIR):
                    offset = gate_offset(sinks[c], has_both, not self.is_softmax_sink)
                    lse[member.token, member.head + head + c] = row_lse(tops[c], totals[c], offset)
            batch += tiling.num_splits * 4

    @cute.jit
    def _load_units(
        self, workspace, tiling, member, first, lane, begin: cutlass.Constexpr, values: cute.Tensor
    ):
        """Load a lane's [4, unit, split] accumulators from split `begin` on; 0 past the last."""
        values.fill(0.0)
        for u in cutlass.range_constexpr(cute.size(values, mode=[1])):
            source = self._accumulators(workspace, tiling, member, first + u)
            for s in cutlass.range_constexpr(cute.size(values, mode=[2])):
                if begin + s < tiling.num_splits:
                    cute.autovec_copy(source[None, lane, begin + s], values[None, u, s])

    def _weigh_heads(self, stats: cute.Tensor, sinks: cute.Tensor):
        """Replace the references [0, splits / 8, pair] by weights; returns the output scale, the
        reference and the total of both heads."""
        scales, tops, totals = [], [], []
        for c in range(PAIR):
            top, total = weigh_splits(
                stats[None, None, c],
                lambda x: over_keys(cute.arch.fmax, x),
                lambda x: over_keys(operator.add, x),
            )
            tops.append(top)
            totals.append(total)
            scales.append(output_scale(top, total, sinks[c], self.is_softmax_sink))
        return scales, tops, totals

    # ---- the workspace ----

    def _accumulators(self, workspace, tiling, member, unit) -> cute.Tensor:
        """[4, lane, split] of a unit."""
        layout = cute.make_layout((4, 32, MAX_SPLITS))
        offset = unit * (tiling.num_splits * UNIT_WORDS)
        pointer = pointer_at(workspace.iterator, member.start + offset, cutlass.Float32)
        return cute.make_tensor(pointer, layout)

    def _statistics(self, workspace, tiling, member, head) -> cute.Tensor:
        """[reference and sum, split] of a head."""
        layout = cute.make_layout((STATS, MAX_SPLITS))
        offset = tiling.num_splits * (self.tile_heads * self.head_dim + head * STATS)
        pointer = pointer_at(workspace.iterator, member.start + offset, cutlass.Float32, 8)
        return cute.make_tensor(pointer, layout)


def gate_offset(sink: cutlass.Float32, has_both, is_gate: bool) -> cutlass.Float32:
    """What the sink gate's biases take off the log of a head's denominator."""
    if not is_gate:
        return cutlass.Float32(0.0)
    return cutlass.select_(has_both, cute.arch.fmax(sink, 0.0), cutlass.Float32(0.0))


@cute.jit
def store_units(
    units: cute.Tensor, scales, o, token, head, column, stride: cutlass.Constexpr, lane
):
    """Scale, round, transpose and write 16-column units of 8 heads.

    Args:
        units: [4, unit] accumulators, as an m16n8 fragment has them.
        scales: of the pair of heads of this thread.
        head, column: first ones; `stride` columns lie between the units' first ones.
    """
    count = cute.size(units, mode=[1])
    together = 2 if count % 2 == 0 else 1
    quad, member = lane // 4, lane % 4
    target = row_pointer(o, token, head + quad) + column
    for first in cutlass.range_constexpr(0, count, together):
        values = cute.make_rmem_tensor((PAIR, 2 * together), o.element_type)
        for i in cutlass.range_constexpr(2 * together):
            for c in cutlass.range_constexpr(PAIR):
                value = units[2 * (i % 2) + c, first + i // 2] * scales[c]
                values[c, i] = value.to(o.element_type)
        # A lane's words were of a pair of heads, at a column each; now they are of one head, at a
        # pair of columns.
        words = cute.recast_tensor(values, cutlass.Int32)
        for i in cutlass.range_constexpr(2 * together):
            words[i] = _transpose(words[i])
        if cutlass.const_expr(together == 2):
            quad_transpose(words, member)
            place = target + (first + member // 2) * stride + member % 2 * 8
            vector = cute.make_tensor(place, cute.make_layout(8))
            cute.autovec_copy(cute.make_tensor(values.iterator, cute.make_layout(8)), vector)
        else:
            for i in cutlass.range_constexpr(2):
                place = cute.recast_ptr(target + first * stride + i * 8, dtype=cutlass.Int32)
                cute.make_tensor(place, cute.make_layout(4))[member] = words[i]


@cute.jit
def _transpose(word: cutlass.Int32) -> cutlass.Int32:
    """Transpose the 8 x 8 matrix of 16-bit elements that a warp holds, a quad each row."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[cutlass.Int32],
        read_only_args=[word],
    )
