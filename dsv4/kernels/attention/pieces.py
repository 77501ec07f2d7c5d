"""Pieces of a token's keys: the splits of a batch-invariant launch, which follow from the token's
own number of key tiles alone.

A token has as many as `PIECE_TILES` tiles for each need, as equally long as they can be. Only where
there would be more than `MAX_SPLITS` are they longer. Plain Python; kernels have the same in
`key_span.TokenPieces`.
"""

from __future__ import annotations

from dsv4.kernels.attention.split_kv import MAX_SPLITS

# The keys of Pro, 1,024 entries and a window of 128: what models have in lists stays whole.
PIECE_TILES = 18


def most_pieces(tiles: int) -> int:
    """Pieces of a token of so many key tiles; none of fewer tiles has more."""
    return max(min(-(-tiles // PIECE_TILES), MAX_SPLITS), 1)
