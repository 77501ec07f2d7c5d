"""Key span of a work tile: which keys a token sees and which key tiles of them a split takes, from
the lengths, clamped.

A token's key tiles are those of its compressed rows, then those of its window; splits take
neighbouring ones. A padding token, whose request id names no request, has none. Nothing here
depends on the architecture.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.mask import clamp_length, is_padding, tokens_after
from dsv4.kernels.attention.pieces import PIECE_TILES
from dsv4.kernels.kit.divisor import divisor

# Flags of a key span: both branches have keys; the tile that was loaded speculatively is its first
# one (hit), or none of its (miss), and the stage that holds it is released unread. Above them lies
# the number of the work tile, where warps have to be told: see `TokenPieces`.
BOTH_BRANCHES, HIT, MISS = 1, 2, 4
INDEX_SHIFT = 3


class SeqlenInfo(NamedTuple):
    """Sizes and lengths of a launch: all that says how many keys there are."""

    tokens: cutlass.Int32
    compressed_rows: cutlass.Int32
    batch: cutlass.Int32
    window_rows: cutlass.Int32
    swa_lens: cute.Tensor  # [batch] int32
    request_ids: cute.Tensor  # [T] int32
    compressed_lens: cute.Tensor  # [T] int32, or [0]: every row counts
    by_request_tokens: cute.FastDivmodDivisorV2 | None = None  # None: no request is likely


@dataclass(frozen=True)
class KeyRules:
    """Compile-time rules of a kernel's keys: rows of a key tile, and a token's view of its window.

    Without `is_causal` a token sees the rows below its request's length, in whatever order they
    are. With it rows are chronological, and the last token of a request sits at its last row: a
    token followed by n others of its request sits at p = length - 1 - n and sees
    p - sliding_window < row <= p.
    """

    tile_rows: int
    is_causal: bool
    sliding_window: int


class KeySpan(NamedTuple):
    """The keys of a work tile: eight words, because neighbouring loads from shared memory become
    loads of four."""

    count: cutlass.Int32  # of key tiles
    flags: cutlass.Int32
    first: cutlass.Int32  # key tile
    compressed_len: cutlass.Int32
    compressed_tiles: cutlass.Int32
    window_begin: cutlass.Int32
    window_end: cutlass.Int32  # exclusive
    request: cutlass.Int32

    @classmethod
    def load(cls, words: cute.Tensor):
        return cls(*(words[i] for i in range(len(cls._fields))))

    def store(self, words: cute.Tensor) -> None:
        for i, word in enumerate(self):
            words[i] = word

    def has(self, flag: int):
        return self.flags & flag != 0

    @property
    def last(self):
        """Key tile after the last one."""
        return self.first + self.count

    def token_tiles(self, keys: int):
        """Key tiles of the token, of `keys` rows."""
        window_tiles = cute.ceil_div(self.window_end - self.window_begin, keys)
        return self.compressed_tiles + window_tiles

    def has_both_branches(self):
        """What `BOTH_BRANCHES` says, for callers without flags."""
        return (self.compressed_len > 0) & (self.window_end > self.window_begin)

    def tile(self, i, keys: int):
        """Key tile i of the token, of `keys` rows: whether it is of the window, its first row, and
        how many of its rows are keys."""
        is_window = i >= self.compressed_tiles
        window_row = self.window_begin + (i - self.compressed_tiles) * keys
        row = cutlass.select_(is_window, window_row, i * keys)
        end = cutlass.select_(is_window, self.window_end, self.compressed_len)
        return is_window, row, cutlass.min(end - row, keys)


SPAN_WORDS = len(KeySpan._fields)
FLAGS_WORD = KeySpan._fields.index("flags")


class TokenPieces(NamedTuple):
    """Splits of a launch that follow from each token's own keys: see `pieces`.

    Those that a launch has room for and a token has no keys for are no work tiles: the warps that
    find keys pass over them, and tell the others which one a span belongs to.
    """

    most: cutlass.Int32  # splits of the launch

    def number(self, tiles):
        """Pieces of a token of so many key tiles."""
        pieces = cutlass.min(cute.ceil_div(cutlass.Int32(tiles), PIECE_TILES), self.most)
        return cutlass.max(pieces, 1)

    def tiles(self, tiles, piece):
        """First key tile of a piece, and how many it has."""
        pieces = self.number(tiles)
        each = cutlass.Int32(tiles) // pieces
        return _tiles_of(each, tiles - each * pieces, piece)


def request_divisor(tokens, batch) -> cute.FastDivmodDivisorV2:
    """Divisor by the tokens of a request, if all have equally many; host code."""
    request_tokens = cute.ceil_div(tokens, cutlass.max(batch, 1))
    return divisor(request_tokens)


def tiles_of_split(tiles, split, by_splits: cute.FastDivmodDivisorV2 | TokenPieces):
    """First key tile of a split, and how many it has."""
    if isinstance(by_splits, TokenPieces):
        return by_splits.tiles(tiles, split)
    each, more = (cutlass.Int32(x) for x in divmod(cutlass.Int32(tiles), by_splits))
    return _tiles_of(each, more, split)


def _tiles_of(each, more, split):
    """The first splits have one more, if not all have equally many."""
    count = each + cutlass.select_(split < more, cutlass.Int32(1), cutlass.Int32(0))
    return each * split + cutlass.min(split, more), count


@cute.jit
def window_len_of(seqlens: SeqlenInfo, request: cutlass.Int32):
    """Given window length of a request, or 0 for that of a padding token."""
    window_len = cutlass.Int32(0)
    if not is_padding(request, seqlens.batch):
        window_len = seqlens.swa_lens[request]
    return window_len


@cute.jit
def key_span(
    seqlens: SeqlenInfo,
    token: cutlass.Int32,
    split: cutlass.Int32,
    by_splits: cute.FastDivmodDivisorV2,
    likely_request: cutlass.Int32,
    rules: cutlass.Constexpr[KeyRules],
) -> KeySpan:
    """The keys of a split of a token, without flags; a padding token has none. The whole warp calls
    this.

    Args:
        likely_request: of the token; where it is, one load waits less for another.
    """
    # The window's length is loaded for the likely request, beside the request itself.
    window_len = window_len_of(seqlens, likely_request)
    compressed_len = cutlass.Int32(seqlens.compressed_rows)
    if token < seqlens.compressed_lens.shape[0]:
        compressed_len = seqlens.compressed_lens[token]
    request = seqlens.request_ids[token]
    if request != likely_request:
        window_len = window_len_of(seqlens, request)
    lengths = (compressed_len, window_len)
    return span_of_lengths(seqlens, token, request, lengths, split, by_splits, rules)


@cute.jit
def span_of_lengths(
    seqlens: SeqlenInfo,
    token: cutlass.Int32,
    request: cutlass.Int32,
    lengths: tuple[cutlass.Int32, cutlass.Int32],
    split: cutlass.Int32,
    by_splits: cute.FastDivmodDivisorV2,
    rules: cutlass.Constexpr[KeyRules],
) -> KeySpan:
    """`key_span` of a token whose request and given lengths, of its compressed rows and of its
    window, have been loaded."""
    compressed_len, window_len = lengths
    compressed_len = clamp_length(compressed_len, seqlens.compressed_rows)
    window_end = clamp_length(window_len, seqlens.window_rows)
    window_begin = cutlass.Int32(0)
    if cutlass.const_expr(rules.is_causal):
        window_end -= tokens_after(seqlens.request_ids, token, request)
        window_end = cutlass.max(window_end, 0)
        window_begin = cutlass.max(window_end - rules.sliding_window, 0)
    if is_padding(request, seqlens.batch):
        compressed_len = cutlass.Int32(0)
        window_begin = cutlass.Int32(0)
        window_end = cutlass.Int32(0)

    compressed_tiles = cute.ceil_div(compressed_len, rules.tile_rows)
    tiles = compressed_tiles + cute.ceil_div(window_end - window_begin, rules.tile_rows)
    first, count = tiles_of_split(tiles, split, by_splits)
    window = (window_begin, window_end, request)
    return KeySpan(count, cutlass.Int32(0), first, compressed_len, compressed_tiles, *window)
