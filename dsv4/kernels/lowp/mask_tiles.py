"""Tiles of keys that a call's mask lets some query of a work tile see: a launch before the
attention, which passes no others.

A list of a work tile is a number of tiles, then the tiles in order. Heads, or batches, that share a
mask share its lists.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.work import Operands, Work, WorkTiles, row_of, word_at

WARP, WARPS = 32, 8
ROWS = 4  # of the mask that a warp looks at together


class MaskTiles:
    """Lists of all work tiles, a CTA each: a warp looks through a tile, until it finds a key that
    is seen."""

    def __init__(self, tiles: WorkTiles):
        self.tiles = tiles

    @cute.jit
    def launch(self, operands: Operands, stream):
        """Write all lists."""
        self.kernel(operands).launch(
            grid=[cutlass.max(self.tiles.count(operands), 1), 1, 1],
            block=[WARP * WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        """The list of a work tile, unless that of another head or batch is the same."""
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        mask, index = operands.attn_mask, cute.arch.block_idx()[0]
        if index < self.tiles.count(operands):
            work = self.tiles.find_any(operands, index)
            is_first = (work.batch == 0 or mask.stride[0] != 0) and (
                work.head == 0 or mask.stride[1] != 0
            )
            if is_first:
                self.write(operands, work)

    @cute.jit
    def write(self, operands: Operands, work: Work):
        """Which tiles are seen, then their numbers in the places of these words."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        words = self.tiles.list_of(operands, work)
        for tile in cutlass.range(warp, work.count, WARPS, unroll=1):
            is_seen = self.is_seen(operands, work, tile, lane)
            if lane == 0:
                word_at(words, 1 + tile).store(Int32(is_seen))
        cute.arch.sync_threads()
        if warp == 0:
            found, before = Int32(0), (Uint32(1) << Uint32(lane)) - Uint32(1)
            for first in cutlass.range(0, work.count, WARP, unroll=1):
                is_seen = Boolean(False)
                if first + lane < work.count:
                    is_seen = word_at(words, 1 + first + lane).load() != 0
                ballot = Uint32(cute.arch.vote_ballot_sync(is_seen))
                # All words have been read: numbers take the places of earlier ones.
                if is_seen:
                    place = found + Int32(cute.arch.popc(ballot & before))
                    word_at(words, 1 + place).store(first + lane)
                found += Int32(cute.arch.popc(ballot))
            if lane == 0:
                word_at(words, 0).store(found)

    @cute.jit
    def is_seen(self, operands: Operands, work: Work, tile, lane) -> Boolean:
        """Whether a query of a work tile sees a key of a tile, as far as the mask says."""
        mask, keys = operands.attn_mask, self.tiles.keys
        dtype, size = mask.element_type, mask.element_type.width // 8
        start = address_of(mask, row_of(mask, work.batch, work.head, work.first_row))
        found, row, last = Boolean(False), Int32(0), work.keys - 1
        while row < work.rows and not found:
            any_seen = Boolean(False)
            for r in cutlass.range_constexpr(ROWS):
                at = Int64(cutlass.min(row + r, work.rows - 1)) * mask.stride[2]
                for part in cutlass.range_constexpr(keys // WARP):
                    # The last key in place of those behind it.
                    key = cutlass.min(tile * keys + part * WARP + lane, last)
                    place = start + (at + key) * size
                    value = pointer_to(place, dtype, size).load()
                    if cutlass.const_expr(dtype is Float32):
                        any_seen = any_seen or value != -Float32.inf
                    else:
                        any_seen = any_seen or value != 0
            found = Boolean(cute.arch.vote_any_sync(any_seen))
            row += ROWS
        return found
