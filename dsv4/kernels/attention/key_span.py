"""Key span of a work tile: which keys a token sees and which key tiles of them a split takes, from
the lengths, clamped.

A token's key tiles are those of its compressed rows, then those of its window; splits take
neighbouring ones. A padding token, whose request id names no request, has none. Nothing here
depends on the architecture.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute

# Flags of a key span: both branches have keys; the tile that was loaded speculatively is its first
# one (hit), or none of its (miss), and the stage that holds it is released unread.
BOTH_BRANCHES, HIT, MISS = 1, 2, 4


class SeqlenInfo(NamedTuple):
    """Sizes and lengths of a launch: all that says how many keys there are."""

    tokens: cutlass.Int32
    compressed_rows: cutlass.Int32
    batch: cutlass.Int32
    window_rows: cutlass.Int32
    swa_lens: cute.Tensor  # [batch] int32
    request_ids: cute.Tensor  # [T] int32
    compressed_lens: cute.Tensor  # [T] int32, or [0]: every row counts
    by_request_tokens: cute.FastDivmodDivisorV2


class KeySpan(NamedTuple):
    """The keys of a work tile, as words in shared memory: eight, because neighbouring loads become
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

    def tile(self, i, keys: int):
        """Key tile i of the token, of `keys` rows: whether it is of the window, its first row, and
        how many of its rows are keys."""
        is_window = i >= self.compressed_tiles
        window_row = self.window_begin + (i - self.compressed_tiles) * keys
        row = cutlass.select_(is_window, window_row, i * keys)
        end = cutlass.select_(is_window, self.window_end, self.compressed_len)
        return is_window, row, cutlass.min(end - row, keys)


SPAN_WORDS = len(KeySpan._fields)


def request_divisor(tokens, batch) -> cute.FastDivmodDivisorV2:
    """Divisor by the tokens of a request, if all have equally many; host code."""
    request_tokens = cute.ceil_div(tokens, cutlass.max(batch, 1))
    return cute.fast_divmod_create_divisor_v2(cutlass.max(request_tokens, 1))


def tiles_of_split(tiles, split, by_splits: cute.FastDivmodDivisorV2):
    """First key tile of a split, and how many it has: the first splits have one more, if not all
    have equally many."""
    each, more = (cutlass.Int32(x) for x in divmod(cutlass.Int32(tiles), by_splits))
    count = each + cutlass.select_(split < more, cutlass.Int32(1), cutlass.Int32(0))
    return each * split + cutlass.min(split, more), count
