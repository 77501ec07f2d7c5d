"""Pieces of a token's keys: the splits of a batch-invariant launch, which follow from the token's
own number of key tiles alone.

A token of up to `WHOLE_TILES` has one piece; of more, pieces of at most `PIECE_TILES` tiles, as
equally long as they can be. Only where a token would have more than `MAX_SPLITS` are they longer.
Plain Python; kernels have the same in `key_span.TokenPieces`.
"""

from __future__ import annotations

from dsv4.kernels.attention.split_kv import MAX_SPLITS

# The keys of Pro, 1,024 entries and a window of 128: what models have in lists stays whole.
WHOLE_TILES = 18
PIECE_TILES = 13


def most_pieces(tiles: int) -> int:
    """Pieces of a token of so many key tiles; none of fewer tiles has more."""
    return 1 if tiles <= WHOLE_TILES else min(-(-tiles // PIECE_TILES), MAX_SPLITS)
