"""Work tiles of the heads-in-M kernel: head tiles, splits, tokens, slices of the columns."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import KeySpan, TokenPieces
from dsv4.kernels.attention.split_kv import counter_words


class HeadsMTiling(NamedTuple):
    """Map from work tiles to heads, splits and tokens."""

    num_splits: cutlass.Int32
    head_tiles: cutlass.Int32
    tile_heads: cutlass.Int32  # rows of a head tile in use, a multiple of 16
    work_tiles: cutlass.Int32
    # Whether most CTAs of the next launch find an SM while this one runs.
    leaves_room: cutlass.Boolean
    # 2 where neighbouring CTAs, with one work tile each, halve the columns of a head tile, or of a
    # split of it; else 1.
    column_slices: cutlass.Int32
    # How rows are combined: an index of the sizes of the combine, 8-column groups that a warp
    # combines at a time, and the power of two of such sub-tiles in a warpgroup's columns.
    combine_size: cutlass.Int32
    combine_groups: cutlass.Int32
    combine_shift: cutlass.Int32
    counters: cutlass.Int32  # words of the workspace before the partials
    # Divisors made by the host: a launch starts with these divisions.
    by_head_tiles: cute.FastDivmodDivisorV2
    by_splits: cute.FastDivmodDivisorV2 | TokenPieces
    by_tokens: cute.FastDivmodDivisorV2 | None  # None without splits

    def plain(self, num_query_heads: int, most_heads: int):
        """The same as compile-time constants where there are neither splits nor slices."""
        one = cutlass.Int32(1)
        head_tiles = cutlass.Int32(-(-num_query_heads // most_heads))
        return self._replace(
            num_splits=one,
            column_slices=one,
            head_tiles=head_tiles,
            by_head_tiles=cute.fast_divmod_create_divisor_v2(head_tiles),
            by_splits=cute.fast_divmod_create_divisor_v2(one),
            by_tokens=None,
        )

    @property
    def is_plain(self) -> bool:
        """Whether this is a `plain` one."""
        return self.by_tokens is None

    def in_pieces(self):
        """The same where splits are the pieces of each token."""
        return self._replace(by_splits=TokenPieces(self.num_splits))

    @property
    def has_pieces(self) -> bool:
        return isinstance(self.by_splits, TokenPieces)

    def of_token(self, span: KeySpan, keys: int):
        """The same with the splits of a span's token, which has pieces: the others' places in the
        workspace stay unused."""
        # `make_warp_uniform` pins this: one register beside the key tiles.
        number = self.by_splits.number(span.token_tiles(keys))
        return self._replace(num_splits=cute.arch.make_warp_uniform(number))

    def own_head(self, head, row, heads: int):
        """The head of a row; none of the `heads` if it is one of another tile's, as rows of tiles
        of fewer heads may be, which a launch without splits has not."""
        if not self.has_pieces:
            return head
        return cutlass.select_(row < self.tile_heads, head, cutlass.Int32(heads))

    def column_slice(self, index):
        """Which half of the columns, where they are sliced."""
        return index & (self.column_slices - 1)

    def of_slice(self, amount):
        """What a CTA has of a head tile's `amount`, in proportion to the columns."""
        return amount >> (self.column_slices - 1)

    def has_subtile(self, i: int):
        """Whether the output warpgroups compute their accumulator sub-tile i, of one or two."""
        return i == 0 or self.column_slices == 1

    def coordinates(self, index):
        """Head tile, split and token of a work tile; the head tiles of a token are neighbours.

        Splits with more key tiles than others come first: CTAs start in order, some of them late.
        """
        rest, head_tile = divmod(index >> (self.column_slices - 1), self.by_head_tiles)
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
    num_sms: cutlass.Int32,
    can_slice: cutlass.Constexpr,
    half_groups: cutlass.Constexpr,
    sizes: cutlass.Constexpr,
    workspace_size,
):
    """Choose the heads of a tile, the slices of its columns, and how its splits are combined.

    Few tokens leave SMs idle. Then two CTAs compute a head tile: both all of P, and each its half
    of the output's columns. With splits, head tiles may also have fewer heads, load less of Q and
    leave less to combine, at the price of reading the keys more often.

    Args:
        half_groups: 8-column groups of half of a head tile's columns.
        sizes: `combine_sizes` of them; none where nothing is combined.
    """
    heads = cutlass.Int32(min(most_heads, -(-num_query_heads // 16) * 16))
    slices = cutlass.Int32(1)
    if cutlass.const_expr(can_slice):  # noqa: SIM102 static, then dynamic
        if 2 * tokens * ((num_query_heads + heads - 1) // heads) * num_splits <= num_sms:
            slices = cutlass.Int32(2)
    for fewer in (32, 16):
        if cutlass.const_expr(has_even_tiles and num_query_heads % fewer == 0):
            # Half a tile's columns are little work for two CTAs: of less than 32 heads, too little.
            is_worth_it = num_splits > 1 and (fewer > 16 or slices == 1)
            if is_worth_it and tokens * num_splits * (num_query_heads // fewer) * slices <= num_sms:
                heads = cutlass.Int32(fewer)
    head_tiles = (num_query_heads + heads - 1) // heads
    work_tiles = tokens * head_tiles * num_splits * slices
    # Sub-tiles that are combined at a time: as small as leaves each warp one, if any size does.
    combine_size, groups, shift = cutlass.Int32(-1), cutlass.Int32(0), cutlass.Int32(0)
    for i, (size, most, least) in enumerate(sizes):
        subtiles = heads // 16 * (half_groups // size) // slices
        is_possible = num_splits >= least and num_splits <= most
        if is_possible and (groups == 0 or subtiles <= 4 * num_splits):
            combine_size, groups = cutlass.Int32(i), cutlass.Int32(size)
            shift = (half_groups // size).bit_length() - slices
    leaves_room = 3 * work_tiles <= 2 * num_sms
    counters = cutlass.Int32(counter_words(workspace_size))
    tokens = cutlass.max(cutlass.Int32(tokens), 1)
    divisors = (cute.fast_divmod_create_divisor_v2(x) for x in (head_tiles, num_splits, tokens))
    extent = (num_splits, head_tiles, heads, work_tiles)
    combine = (combine_size, groups, shift)
    return HeadsMTiling(*extent, leaves_room, slices, *combine, counters, *divisors)
