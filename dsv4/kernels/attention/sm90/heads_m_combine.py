"""Split-KV on Hopper: the CTAs that share the keys of a head tile join their partial rows.

Every CTA of a group (token, head tile, share of its columns) writes its accumulators in 16 bits
(`fmha_sm90_partials`) and its row statistics to the workspace, meets the others
(`fmha_sm90_meeting`), and then joins its share of the rows, always in split order: the result does
not depend on who joins what.

Workspace, in words of 32 bits; `counter_words` says where the groups begin:

    counters  [group][half] 64 bits, 0 before the first launch
    groups    [group] of
        accumulators  [half][16 rows][16 columns][split][lane][8] fp16, as their threads hold them
        statistics    [split][row][reference, sum] fp32
        scales        [piece of the columns][split][row] fp32
"""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.device import pointer_at, store_rows
from dsv4.kernels.attention.sm90.partials import store_piece
from dsv4.kernels.attention.sm90.semaphore import Meeting, weigh_splits
from dsv4.kernels.attention.sm100.combine import output_scale, row_lse
from dsv4.kernels.attention.softmax import quad_max, quad_sum
from dsv4.kernels.attention.split_kv import MAX_SPLITS, counter_words, join_sizes

STATS = 2  # reference and sum of a row
UNIT_WORDS = 128  # of a split's 16 rows and 16 columns
LANE_WORDS = UNIT_WORDS // 32


class Tiling(NamedTuple):
    """How work items map to heads, splits and tokens."""

    num_splits: cutlass.Int32
    head_tiles: cutlass.Int32
    tile_heads: cutlass.Int32  # rows of a tile in use, a multiple of 16
    works: cutlass.Int32
    # Whether most CTAs of the next launch find a multiprocessor while this one runs.
    leaves_room: cutlass.Boolean
    # 2 where neighbouring CTAs, with one work item each, halve the columns of a head tile, or of a
    # split of it; else 1.
    column_shares: cutlass.Int32
    # How rows are joined: an index of `join_sizes`, 8-column groups that a warp joins at a time,
    # and the power of two of such pieces in a warpgroup's columns.
    join_size: cutlass.Int32
    join_groups: cutlass.Int32
    join_shift: cutlass.Int32
    counters: cutlass.Int32  # words of the workspace before the groups
    # Divisors made by the host: a launch starts with these divisions.
    by_head_tiles: cute.FastDivmodDivisorV2
    by_splits: cute.FastDivmodDivisorV2
    by_tokens: cute.FastDivmodDivisorV2 | None  # None without splits

    def plain(self, num_query_heads: int, most_heads: int):
        """The same, for a compiler that shall know that there are neither splits nor shares."""
        one = cutlass.Int32(1)
        head_tiles = cutlass.Int32(-(-num_query_heads // most_heads))
        return self._replace(
            num_splits=one,
            column_shares=one,
            head_tiles=head_tiles,
            by_head_tiles=cute.fast_divmod_create_divisor_v2(head_tiles),
            by_splits=cute.fast_divmod_create_divisor_v2(one),
            by_tokens=None,
        )

    def column_share(self, index):
        """Which half of the columns, where they are shared."""
        return index & (self.column_shares - 1)

    def of_share(self, amount):
        """What a CTA has of a head tile's `amount`, in proportion to the columns."""
        return amount >> (self.column_shares - 1)

    def has_piece(self, i: int):
        """Whether the output warpgroups compute their piece i, of one or two."""
        return i == 0 or self.column_shares == 1

    def coordinates(self, index):
        """Head tile, split and token of a work item; the head tiles of a token are neighbours.

        Splits with more blocks than others come first: CTAs start in order, some of them late.
        """
        rest, head_tile = divmod(index >> (self.column_shares - 1), self.by_head_tiles)
        split, token = 0, rest
        if self.by_tokens is not None:
            split, token = divmod(rest, self.by_tokens)
        return cutlass.Int32(head_tile), cutlass.Int32(split), cutlass.Int32(token)


@cute.jit
def make_tiling(
    num_query_heads: cutlass.Constexpr,
    most_heads: cutlass.Constexpr,
    has_even_tiles: cutlass.Constexpr,
    tokens,
    num_splits: cutlass.Int32,
    num_ctas: cutlass.Int32,
    can_share: cutlass.Constexpr,
    half_groups: cutlass.Constexpr,
    workspace_size,
):
    """Choose the heads of a tile.

    Few tokens leave multiprocessors idle. Then two CTAs share a tile: both compute the weights, and
    each its half of the output's columns. With splits, tiles may also have fewer heads, load less
    of Q and leave less to join, at the price of reading the keys more often.
    """
    heads = cutlass.Int32(min(most_heads, -(-num_query_heads // 16) * 16))
    shares = cutlass.Int32(1)
    if cutlass.const_expr(can_share):  # noqa: SIM102 static, then dynamic
        if 2 * tokens * ((num_query_heads + heads - 1) // heads) * num_splits <= num_ctas:
            shares = cutlass.Int32(2)
    for fewer in (32, 16):
        if cutlass.const_expr(has_even_tiles and num_query_heads % fewer == 0):
            # Half a tile's columns are little work for two CTAs: of less than 32 heads, too little.
            is_worth_it = num_splits > 1 and (fewer > 16 or shares == 1)
            if (
                is_worth_it
                and tokens * num_splits * (num_query_heads // fewer) * shares <= num_ctas
            ):
                heads = cutlass.Int32(fewer)
    head_tiles = (num_query_heads + heads - 1) // heads
    works = tokens * head_tiles * num_splits * shares
    # Pieces that are joined at a time: as small as leaves each warp one, if any size does.
    join_size, groups, shift = cutlass.Int32(-1), cutlass.Int32(0), cutlass.Int32(0)
    for i, (size, most, least) in enumerate(join_sizes(half_groups)):
        pieces = heads // 16 * (half_groups // size) // shares
        is_possible = num_splits >= least and num_splits <= most
        if is_possible and (groups == 0 or pieces <= 4 * num_splits):
            join_size, groups = cutlass.Int32(i), cutlass.Int32(size)
            shift = (half_groups // size).bit_length() - shares
    leaves_room = 3 * works <= 2 * num_ctas
    counters = cutlass.Int32(counter_words(workspace_size))
    tokens = cutlass.max(cutlass.Int32(tokens), 1)
    divisors = (cute.fast_divmod_create_divisor_v2(x) for x in (head_tiles, num_splits, tokens))
    sizes = (num_splits, head_tiles, heads, works)
    join = (join_size, groups, shift)
    return Tiling(*sizes, leaves_room, shares, *join, counters, *divisors)


class Member(NamedTuple):
    """A split of a head tile of a token, and its group's part of the workspace."""

    token: cutlass.Int32
    head: cutlass.Int32  # first of the tile
    split: cutlass.Int32
    column_group: cutlass.Int32  # first of the share
    group: cutlass.Int32
    start: cutlass.Int64  # of the group, in words


class Piece(NamedTuple):
    """What a warp joins at a time: 16 rows of some columns. Places are words of the group's part of
    the workspace, of split 0 and the warp's first lane."""

    index: cutlass.Int32  # among those of a half
    row: cutlass.Int32  # first of the tile
    column_group: cutlass.Int32  # first of the half
    accumulators: cutlass.Int32
    statistics: cutlass.Int32
    scales: cutlass.Int32


class SplitJoin(Meeting):
    """Partial rows of one kernel configuration: how they are left, and how they are joined."""

    def __init__(self, head_dim: int, num_query_heads: int, sink_mode: str, piece_dim: int):
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads
        self.is_softmax_sink = sink_mode == "softmax"
        self.half_dim = head_dim // 2
        self.column_groups = self.half_dim // 8
        # Columns of a warpgroup's pieces, each with scales of its own.
        self.piece_dim = piece_dim
        self.part_shift = (piece_dim // 8).bit_length() - 1  # of 8-column groups to pieces
        self.row_words = STATS + head_dim // piece_dim  # of statistics
        self.joins = join_sizes(self.column_groups)

    @cute.jit
    def member(self, tiling: Tiling, index: cutlass.Int32):
        # Shuffles stay where they are: the divisions would move down to where they are waited for.
        uniform = cute.arch.make_warp_uniform
        head_tile, split, token = (uniform(x) for x in tiling.coordinates(index))
        share = uniform(tiling.column_share(index))
        group = (token * tiling.head_tiles + head_tile) * tiling.column_shares + share
        # Words of one split of a group.
        size = tiling.tile_heads * (tiling.of_share(self.head_dim // 2) + self.row_words)
        start = tiling.counters + cutlass.Int64(group) * (size * tiling.num_splits)
        head, column_group = head_tile * tiling.tile_heads, share * self.column_groups
        return Member(token, head, split, column_group, group, start)

    # ---- one CTA's part ----

    @cute.jit
    def store_statistics(self, workspace, tiling, member, row, ref, total):
        """Leave the statistics of a row."""
        stats = cute.make_rmem_tensor(STATS, cutlass.Float32)
        stats[0], stats[1] = ref, total
        offset = self._statistics(tiling, row, member.split)
        target = self._pointer(workspace, member, offset, cutlass.Float32, 8)
        cute.autovec_copy(stats, cute.make_tensor(target, stats.layout))

    @cute.jit
    def warp_place(self, tiling, member, half, warp):
        """Where a warp leaves its accumulators, in words of the group's part of the workspace; to
        be found before the products, not between the last one and the rows."""
        place = self._accumulators(tiling, half, warp, 0) + member.split * UNIT_WORDS
        return cute.arch.make_warp_uniform(place)

    @cute.jit
    def store_accumulators(self, pieces, workspace, tiling, member, place, half, warp, lane):
        """Leave a warp's 16 rows of half of the columns, given in pieces; these may be changed.
        `place` is what `warp_place` says."""
        if warp * 16 < tiling.tile_heads:
            offset = place + lane * LANE_WORDS
            start = self._pointer(workspace, member, offset, cutlass.Float32)
            # A shuffle stays where it is: the compiler would take the products with this out of the
            # loop over work items, and spill them.
            step = cute.arch.make_warp_uniform(tiling.num_splits * UNIT_WORDS)
            scales = cute.make_rmem_tensor(2, cutlass.Float32)
            for i, piece in enumerate(pieces):
                if tiling.has_piece(i):
                    first = i * (self.piece_dim // 16) * step
                    store_piece(piece, start + first, step, scales)
                    if lane % 4 == 0:
                        row, part = warp * 16 + lane // 4, half * len(pieces) + i
                        offset = self._scales(tiling, part, row, member.split)
                        target = self._pointer(workspace, member, offset, cutlass.Float32, 4)
                        for r in cutlass.range_constexpr(2):
                            target[8 * r] = scales[r]

    # ---- the join ----

    @cute.jit
    def first_piece(self, tiling, half, share, warp):
        """The first piece of a share that a warp joins.

        The pieces of a tile are dealt out: no CTA gets a second one before all have one. Warps of a
        number have a scheduler in common: the halves begin with different ones.
        """
        return self._piece(tiling, half, share + (warp + 2 * half) % 4 * tiling.num_splits)

    @cute.jit
    def _piece(self, tiling, half, index):
        # Shuffles stay where they are: before the wait for other CTAs, not behind it.
        uniform = cute.arch.make_warp_uniform
        block = index >> tiling.join_shift
        column_group = (index - (block << tiling.join_shift)) * tiling.join_groups
        part = half * (self.half_dim // self.piece_dim) + (column_group >> self.part_shift)
        return Piece(
            uniform(index),
            uniform(block * 16),
            uniform(column_group),
            uniform(self._accumulators(tiling, half, block, column_group >> 1)),
            uniform(self._statistics(tiling, block * 16, 0)),
            uniform(self._scales(tiling, part, block * 16, 0)),
        )

    @cute.jit
    def join(
        self,
        workspace,
        tiling,
        member,
        half,
        shares,
        own_piece: Piece,
        warp,
        lane,
        sink_logits,
        gate_offset,
        o,
        lse,
    ):
        """Join the shares, given as bits, of half of a tile's columns; a warpgroup calls this.

        Args:
            own_piece: the first one of this CTA's own share that the warp joins.
            gate_offset: [row] what the sink gate takes off the log of a row's denominator.
        """
        while shares != 0:
            share = cute.arch.popc(~shares & (shares - 1))
            shares &= shares - 1
            first = own_piece
            if share != member.split:
                first = self.first_piece(tiling, half, share, warp)
            for i, (groups, most, _) in enumerate(self.joins):
                if tiling.join_size == i:
                    self._join(
                        *(workspace, tiling, member, half, first, lane),
                        *(sink_logits, gate_offset, o, lse),
                        groups,
                        most,
                    )

    @cute.jit
    def _join(
        self,
        workspace,
        tiling,
        member,
        half,
        piece,
        lane,
        sink_logits,
        gate_offset,
        o,
        lse,
        groups: cutlass.Constexpr,
        most_splits: cutlass.Constexpr,
    ):
        """Join every so many-th piece of a tile: 16 rows of `groups` 8-column groups."""
        pieces = tiling.tile_heads >> 4 << tiling.join_shift
        while piece.index < pieces:
            row = piece.row + lane // 4
            # A multiple of 8 for all to see, as wide stores need.
            first_group = member.column_group + half * tiling.of_share(self.column_groups)
            column = (first_group + piece.column_group) * 8

            # ---- loads, all under way together ----
            sinks = cute.make_rmem_tensor(2, cutlass.Float32)
            sinks.fill(0.0)
            values = cute.make_rmem_tensor((8, groups // 2, most_splits), cutlass.Float16)
            for r in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.is_softmax_sink):  # noqa: SIM102 static, then dynamic
                    if member.head + row + 8 * r < self.num_query_heads:
                        sinks[r] = sink_logits[member.head + row + 8 * r]
            stats, scales = self._load_statistics(
                workspace, tiling, member, piece, lane, most_splits
            )
            values.fill(0.0)
            layout = cute.make_layout((8, MAX_SPLITS), stride=(1, 2 * UNIT_WORDS))
            for g in cutlass.range_constexpr(groups // 2):
                offset = piece.accumulators + g * tiling.num_splits * UNIT_WORDS + lane * LANE_WORDS
                rows = self._pointer(workspace, member, offset, cutlass.Float16)
                rows = cute.make_tensor(rows, layout)
                for s in cutlass.range_constexpr(most_splits):
                    if s < tiling.num_splits:
                        cute.autovec_copy(rows[None, s], values[None, g, s])

            no_bits = cutlass.Int32(0)
            # Of many splits, some may well be waited for before the last ones are asked for.
            if cutlass.const_expr(most_splits <= 12):
                no_bits = _zero_after(values, tiling.tile_heads >> 16)
            factors, tops, totals = self._weigh(stats, scales, sinks)
            # The weights are found meanwhile; only what uses the rows comes after all loads.
            words = cute.recast_tensor(stats, cutlass.Int32)
            for i in cutlass.range_constexpr(most_splits // 4):
                for r in cutlass.range_constexpr(2):
                    words[0, i, r] |= no_bits

            # ---- rows, in split order ----
            acc = cute.make_rmem_tensor((8, groups // 2), cutlass.Float32)
            acc.fill(0.0)
            for s in cutlass.range_constexpr(most_splits):
                for r in cutlass.range_constexpr(2):
                    weight = cute.arch.shuffle_sync(stats[0, s // 4, r], lane // 4 * 4 + s % 4)
                    for g in cutlass.range_constexpr(groups // 2):
                        for i in (2 * r, 2 * r + 1, 2 * r + 4, 2 * r + 5):
                            acc[i, g] += weight * values[i, g, s].to(cutlass.Float32)
            store_rows(
                acc, o, factors, member.token, member.head + row, column, lane, self.num_query_heads
            )
            if member.token < lse.shape[0] and column == 0 and lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    head = member.head + row + 8 * r
                    if head < self.num_query_heads:
                        lse[member.token, head] = row_lse(
                            tops[r], totals[r], gate_offset[row + 8 * r]
                        )
            index = piece.index + tiling.num_splits * 4
            # Most warps have one piece: they shall not look for another before they end.
            if index < pieces:
                piece = self._piece(tiling, half, index)
            else:
                piece = piece._replace(index=index)

    @cute.jit
    def _load_statistics(
        self, workspace, tiling, member, piece, lane, most_splits: cutlass.Constexpr
    ):
        """Statistics [2, splits / 4, row] of every fourth split of a thread's two rows, and the
        scales [splits / 4, row] of a part of their columns."""
        stats = cute.make_rmem_tensor((STATS, most_splits // 4, 2), cutlass.Float32)
        scales = cute.make_rmem_tensor((most_splits // 4, 2), cutlass.Float32)
        scales.fill(0.0)
        first, step = lane % 4, 4 * tiling.tile_heads
        row = first * tiling.tile_heads + lane // 4
        offset = piece.statistics + row * STATS
        source = self._pointer(workspace, member, offset, cutlass.Float32, 8)
        source_scales = self._pointer(workspace, member, piece.scales + row, cutlass.Float32, 4)
        for i in cutlass.range_constexpr(most_splits // 4):
            from_stats = pointer_at(source, i * STATS * step, cutlass.Float32, 8)
            from_scales = source_scales + i * step
            for r in cutlass.range_constexpr(2):
                stats[0, i, r], stats[1, i, r] = -cutlass.Float32.inf, cutlass.Float32(0.0)
                if i * 4 + first < tiling.num_splits:
                    pair = cute.make_tensor(from_stats + 8 * r * STATS, cute.make_layout(STATS))
                    cute.autovec_copy(pair, stats[None, i, r])
                    scales[i, r] = from_scales[8 * r]
        return stats, scales

    def _weigh(self, stats: cute.Tensor, scales: cute.Tensor, sinks: cute.Tensor):
        """Replace the references [0, splits / 4, row] by what stored values are to be multiplied
        by; returns the output scale, the reference and the total of both rows."""
        factors, tops, totals = [], [], []
        for r in range(2):
            top, total = weigh_splits(stats[None, None, r], quad_max, quad_sum, scales[None, r])
            tops.append(top)
            totals.append(total)
            factors.append(output_scale(top, total, sinks[r], self.is_softmax_sink))
        return factors, tops, totals

    # ---- a group's part of the workspace, in words ----

    def _accumulators(self, tiling, half, block, unit):
        """Of split 0 of 16 rows and 16 columns, 4 words a lane; the next splits' follow."""
        blocks = half * (tiling.tile_heads >> 4) + block
        units = tiling.of_share(self.column_groups // 2)
        return (blocks * units + unit) * (tiling.num_splits * UNIT_WORDS)

    def _statistics(self, tiling, row, split):
        """Reference and sum of a row of a split; the next rows' follow."""
        rows = tiling.num_splits * tiling.tile_heads * tiling.of_share(self.head_dim // 2)
        return rows + (split * tiling.tile_heads + row) * STATS

    def _scales(self, tiling, part, row, split):
        """Scale of a part of a row of a split; the next rows' follow."""
        rows = tiling.num_splits * tiling.tile_heads
        offset = rows * (tiling.of_share(self.head_dim // 2) + STATS + part)
        return offset + split * tiling.tile_heads + row

    def _pointer(self, workspace, member, offset, dtype, align: int = 16) -> cute.Pointer:
        return pointer_at(workspace.iterator, member.start + offset, dtype, align)


def _zero_after(values: cute.Tensor, zero):
    """0, as `zero` is, once values [8, groups, splits] are loaded.

    The compiler likes to load some splits, use them, and load the next: a way to memory each time.
    What depends on a 0 that it cannot know comes after all loads.
    """
    words, bits = cute.recast_tensor(values, cutlass.Int32), cutlass.Int32(0)
    for group in range(cute.size(words, mode=[1])):
        for split in range(cute.size(words, mode=[2])):
            bits |= words[0, group, split]
    return bits & zero
