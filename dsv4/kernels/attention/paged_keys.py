"""Keys of a paged cache: which rows of the pools a token sees, and where they are.

A token has keys in two pools, compressed and window, each named by a list of slots per token or by
a table of pages per request. Which of the two a pool has is decided at run time, by the table's
size. A key that is none (an index of -1, one out of range, a page that does not exist) has the
address 0: it is not read.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import (
    BOTH_BRANCHES,
    KeySpan,
    TokenPieces,
    tiles_of_split,
)
from dsv4.kernels.attention.mask import clamp_length
from dsv4.kernels.kit.vectors import prefetch_l2

LINE_WORDS = 32  # of a line of L2


class KeyPool(NamedTuple):
    """The keys of one branch: pages of rows, and how tokens name them."""

    pool: cute.Tensor  # [pages, P, row]
    indices: cute.Tensor  # [T, k] int32 slots; k = 0 with a table
    lens: cute.Tensor  # [T] int32 leading columns in use, or [0]: all
    table: cute.Tensor  # [B, c] int32 pages, or [0, 0]: lists
    by_page: cute.FastDivmodDivisorV2  # keys of a page
    by_columns: cute.FastDivmodDivisorV2  # of the table

    def has_table(self):
        return self.table.shape[0] > 0

    @cute.jit
    def list_len(self, token):
        """Columns in use of a token's list."""
        length = cutlass.Int32(self.indices.shape[1])
        if token < self.lens.shape[0]:
            length = clamp_length(self.lens[token], length)
        return length

    @cute.jit
    def prefetch(self, token, lane):
        """Bring the start of a token's list, and its length, into L2; a warp calls this."""
        column = lane * LINE_WORDS
        if column < self.indices.shape[1]:
            prefetch_l2((self.indices[token, None].iterator + column).toint())
        if lane == 0 and token < self.lens.shape[0]:
            prefetch_l2((self.lens.iterator + token).toint())

    @cute.jit
    def fetch(self, token, request, n, end):
        """The word that names key n: a slot of the list, or the page of the table's column; -1
        from `end` on."""
        word = cutlass.Int32(-1)
        if n < end:
            if self.has_table():
                page, _ = divmod(n, self.by_page)
                _, column = divmod(cutlass.Int32(page), self.by_columns)
                word = self.table[request, column]
            else:
                word = self.indices[token, n]
        return word

    @cute.jit
    def addresses(self, word, n, entry: cutlass.Constexpr):
        """Addresses of the row of key n, whose word has been fetched, and of its scales; 0 where
        there is none.

        Args:
            entry: `Fp8Entry` of the pool, or None: rows of one type.
        """
        page, offset, is_key = self.place(word, n)
        page, offset = cutlass.Int64(page), cutlass.Int64(offset)
        size, zero = self.pool.element_type.width // 8, cutlass.Int64(0)
        start = self.pool.iterator.toint() + page * cutlass.Int64(self.pool.stride[0]) * size
        if cutlass.const_expr(entry is None):
            row = start + offset * cutlass.Int64(self.pool.stride[1]) * size
            return cutlass.select_(is_key, cutlass.Int64(row), zero), zero
        record = start + offset * entry.record_bytes
        page_records = cutlass.Int64(self.pool.shape[1]) * entry.record_bytes
        scales = start + page_records + offset * entry.scale_bytes
        return tuple(cutlass.select_(is_key, cutlass.Int64(x), zero) for x in (record, scales))

    @cute.jit
    def place(self, word, n):
        """Page and place in it of key n, and whether it is a key."""
        pages, page_keys = cutlass.Int32(self.pool.shape[0]), cutlass.Int32(self.pool.shape[1])
        slot, limit = word, pages * page_keys
        if self.has_table():
            slot, limit = n, pages
        page, offset = (cutlass.Int32(x) for x in divmod(slot, self.by_page))
        if self.has_table():
            page = word
        is_key = (word >= 0) & (word < limit)
        return page, offset, is_key

    @cute.jit
    def has_keys(self, token, request, begin, end):
        """Whether any of a token's keys from `begin` on is one; the whole warp calls this."""
        found = cutlass.Boolean(False)
        n = cutlass.Int32(begin)
        while n < end and not found:
            mine = n + cute.arch.lane_idx()
            _, _, is_key = self.place(self.fetch(token, request, mine, end), mine)
            found = cute.arch.vote_any_sync(is_key)
            n += 32
        return found


class PagedKeys(NamedTuple):
    """All that says which keys the tokens of a launch have."""

    compressed: KeyPool
    window: KeyPool
    positions: cute.Tensor  # [T] int32, or [0]
    request_ids: cute.Tensor  # [T] int32, or [0]
    sliding_window: cutlass.Int32
    ratio: cutlass.Int32  # positions per compressed key of a table; 0: none

    @cute.jit
    def span(
        self,
        token: cutlass.Int32,
        split: cutlass.Int32,
        by_splits: cute.FastDivmodDivisorV2 | TokenPieces,
        keys: cutlass.Constexpr,
        is_gate: cutlass.Constexpr,
    ) -> KeySpan:
        """The keys of a split of a token; the whole warp calls this.

        Rows of the span are columns of the lists, or numbers of keys where tables name them.

        Args:
            keys: of a key tile.
            is_gate: whether `BOTH_BRANCHES` is asked for: a branch without a single key is empty.
        """
        request, compressed_len, window_begin, window_end = self._lengths(token)
        flags = cutlass.Int32(0)
        if cutlass.const_expr(is_gate):
            zero = cutlass.Int32(0)
            if self.compressed.has_keys(token, request, zero, compressed_len):  # noqa: SIM102
                if self.window.has_keys(token, request, window_begin, window_end):
                    flags = cutlass.Int32(BOTH_BRANCHES)
        compressed_tiles = cute.ceil_div(compressed_len, keys)
        tiles = compressed_tiles + cute.ceil_div(window_end - window_begin, keys)
        first, count = tiles_of_split(tiles, split, by_splits)
        window = (window_begin, window_end, request)
        return KeySpan(count, flags, first, compressed_len, compressed_tiles, *window)

    @cute.jit
    def tiles(self, token: cutlass.Int32, keys: cutlass.Constexpr):
        """Key tiles of a token; each lane may ask for another one."""
        _, compressed_len, window_begin, window_end = self._lengths(token)
        return cute.ceil_div(compressed_len, keys) + cute.ceil_div(window_end - window_begin, keys)

    @cute.jit
    def _lengths(self, token: cutlass.Int32):
        """Request of a token, its number of compressed keys, first and end of its window."""
        request, position = cutlass.Int32(0), cutlass.Int32(-1)
        if token < self.request_ids.shape[0]:
            request = self.request_ids[token]
        if token < self.positions.shape[0]:
            position = self.positions[token]
        compressed_len, window_end = self.compressed.list_len(token), self.window.list_len(token)
        window_begin = cutlass.Int32(0)
        if self.compressed.has_table():
            compressed_len = self._entries(position)
            if request >= self.compressed.table.shape[0]:
                compressed_len = cutlass.Int32(0)
        if self.window.has_table():
            window_end = cutlass.max(position + 1, 0)
            window_begin = cutlass.max(window_end - self.sliding_window, 0)
            if request >= self.window.table.shape[0]:
                window_end = window_begin
        if request < 0:
            compressed_len = cutlass.Int32(0)
            window_end = window_begin
        return request, compressed_len, window_begin, window_end

    def prefetch(self, token, lane) -> None:
        """Bring what names a token's keys into L2; a warp calls this."""
        self.compressed.prefetch(token, lane)
        self.window.prefetch(token, lane)

    def has_table(self, span: KeySpan, i):
        """Whether a table names the rows of key tile i of a token."""
        is_window = i >= span.compressed_tiles
        own, others = self.window.has_table(), self.compressed.has_table()
        return cutlass.select_(is_window, cutlass.Boolean(own), cutlass.Boolean(others))

    @cute.jit
    def _entries(self, position):
        """Compressed keys of a table that a position sees."""
        entries = cutlass.Int32(0)
        if self.ratio > 0:
            entries = cutlass.max(position + 1, 0) // self.ratio
        table = self.compressed.table
        capacity = table.shape[1] * self.compressed.pool.shape[1]
        return cutlass.min(entries, cutlass.Int32(capacity))

    @cute.jit
    def fetch(self, span: KeySpan, token, i, row, keys: cutlass.Constexpr):
        """The word of a row of key tile i of a token: see `KeyPool.fetch`."""
        is_window, first, valid = span.tile(i, keys)
        n, end = first + row, first + valid
        word = cutlass.Int32(-1)
        if is_window:
            word = self.window.fetch(token, span.request, n, end)
        else:
            word = self.compressed.fetch(token, span.request, n, end)
        return word

    @cute.jit
    def addresses(
        self, span: KeySpan, i, row, word, keys: cutlass.Constexpr, entry: cutlass.Constexpr
    ):
        """Addresses of the row of key tile i that `word` names: see `KeyPool.addresses`."""
        is_window, first, _ = span.tile(i, keys)
        address, scales = cutlass.Int64(0), cutlass.Int64(0)
        if is_window:
            address, scales = self.window.addresses(word, first + row, entry)
        else:
            address, scales = self.compressed.addresses(word, first + row, entry)
        return address, scales
