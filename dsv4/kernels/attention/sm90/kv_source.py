"""Sources of key tiles: where the load warp gets the rows that a key span names.

A source has `load(tile, token, slot)`, one thread's fetch of some columns of a tile into a slot of
the KV ring, and `prefetch(tile, token, chunk)`, the same into L2. Roles other than the load warp,
and the scheduler warp with what it says of the first tile, do not know the source.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.attention.key_span import KeySpan, SeqlenInfo, tiles_of_split
from dsv4.kernels.kit.tma import tma_load, tma_prefetch


class KeyTile(NamedTuple):
    """A tile of keys in global memory."""

    is_window: cutlass.Boolean
    row: cutlass.Int32  # first one, of the token's compressed rows or of the request's window
    request: cutlass.Int32

    @classmethod
    def of_span(cls, span: KeySpan, i, keys: int):
        """Key tile i of a token, of `keys` rows."""
        is_window, row, _ = span.tile(i, keys)
        return cls(is_window, row, span.request)


class Slot(NamedTuple):
    """Target of a load: the mbarrier that counts its bytes, and a place in shared memory for some
    columns of a tile."""

    full: cute.Pointer
    target: cute.Pointer
    chunk: int | cutlass.Int32  # first swizzle span of the columns


class SpeculativeTile(NamedTuple):
    """The first key tile of a split if all lengths are full and all requests have equally many
    tokens, as is likely in a decoding batch: known without a load, so that it is on its way while
    the lengths are."""

    index: cutlass.Int32  # among the token's key tiles, or -1
    tile: KeyTile

    def exists(self):
        return self.index >= 0

    def none(self):
        """For the work tiles after a CTA's first one, whose lengths are known early enough."""
        return self._replace(index=cutlass.Int32(-1))


@cute.jit
def speculate_first_tile(
    seqlens: SeqlenInfo,
    token: cutlass.Int32,
    split: cutlass.Int32,
    by_splits: cute.FastDivmodDivisorV2,
    keys: cutlass.Constexpr,
):
    """The speculative first tile of a split."""
    compressed_tiles = cute.ceil_div(seqlens.compressed_rows, keys)
    tiles = compressed_tiles + cute.ceil_div(seqlens.window_rows, keys)
    index, _ = tiles_of_split(tiles, split, by_splits)
    is_window = index >= compressed_tiles
    row = cutlass.select_(is_window, index - compressed_tiles, index) * keys
    request = cutlass.Int32(token // seqlens.by_request_tokens)
    index = cutlass.select_(index < tiles, index, cutlass.Int32(-1))
    return SpeculativeTile(index, KeyTile(is_window, row, request))


@dataclass(frozen=True)
class DenseKv:
    """Key tiles from dense tensors: compressed rows of each token, window rows of each request."""

    compressed: TensorMap  # of [T, top_k, head_dim]
    window: TensorMap  # of [batch, W, head_dim]

    @cute.jit
    def load(self, tile: KeyTile, token, slot: Slot):
        """Fetch the slot's columns of a tile; one thread calls this, and has announced the
        bytes."""
        if tile.is_window:
            place = [0, tile.row, slot.chunk, tile.request]
            tma_load(self.window, slot.target, place, slot.full)
        else:
            tma_load(self.compressed, slot.target, [0, tile.row, slot.chunk, token], slot.full)

    @cute.jit
    def prefetch(self, tile: KeyTile, token, chunk):
        """Ask for the columns of a slot to be brought into L2; one thread calls this."""
        if tile.is_window:
            tma_prefetch(self.window, [0, tile.row, chunk, tile.request])
        else:
            tma_prefetch(self.compressed, [0, tile.row, chunk, token])
