"""Gather of FP8 entries as they lie, by the warps of one of the two CTAs of a token: half of the
codes by cp.async, half of the rotated values through registers, which divide them by the scale of
their key: products of codes and of rotated values then have one accumulator."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, pipeline

from dsv4.kernels.attention.entry_codes import load_scales, scale_byte, scale_of
from dsv4.kernels.attention.gather_fp8 import load_words, store_vector
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm100.context import Context2Cta
from dsv4.kernels.attention.sm100.plan_1cta import KEYS
from dsv4.kernels.attention.sm100.plan_2cta import HEAD_DIM
from dsv4.kernels.attention.sm100.plan_codes import (
    AHEAD,
    CODE_BYTES,
    CODE_SPAN,
    HALF_CODES,
    ROPE_SPAN,
    SPANS,
    STAGE_BYTES,
)
from dsv4.kernels.attention.sm100.plan_paged import GATHER_WARPS
from dsv4.kernels.kit.gather import copy_vector, vector_offset, vectors_per_span
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.kernels.kit.quant import multiply_bf16x2, reciprocal_bf16x2
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

ENTRY = Fp8Entry(HEAD_DIM)
WARP_KEYS = KEYS // GATHER_WARPS
TILES = 32 // WARP_KEYS  # whose rows a warp looks up at a time
ROPE_VECTORS = vectors_per_span(ROPE_SPAN)
ROPE_ROWS = 32 // ROPE_VECTORS  # of a warp at a time
ROPE_STEPS = WARP_KEYS // ROPE_ROWS


class RingPlace(NamedTuple):
    """A gather warp's place in the ring of key tiles."""

    tiles: Int32  # that it has gone through
    slot: Int32
    phase: Int32

    def state(self, stages: int, offset: int = 0) -> pipeline.PipelineState:
        """The pipeline's state, some slots away: arrivals do not look at the phase."""
        slot = self.slot + offset
        if offset:
            slot = cutlass.select_(slot < 0, slot + stages, slot)
        return pipeline.PipelineState(stages, self.tiles, slot, self.phase)

    def next(self, stages: int) -> "RingPlace":
        """The place after a tile."""
        is_last = self.slot == stages - 1
        slot = cutlass.select_(is_last, Int32(0), self.slot + 1)
        flip = cutlass.select_(is_last, Int32(1), Int32(0))
        return RingPlace(self.tiles + 1, slot, self.phase ^ flip)

    def back(self, stages: int) -> "RingPlace":
        """The place before the last steps, which handed tiles over alone."""
        slot = self.slot - AHEAD
        is_before = slot < 0
        flip = cutlass.select_(is_before, Int32(1), Int32(0))
        slot = cutlass.select_(is_before, slot + stages, slot)
        return RingPlace(self.tiles - AHEAD, slot, self.phase ^ flip)


@dataclass(frozen=True)
class HalfEntries:
    """Copies of a warp's rows of every key tile; the whole warp calls its methods.

    Attributes:
        half: of the columns.
    """

    half: Int32

    @cute.jit
    def gather_tiles(
        self, ctx: Context2Cta, stages: cutlass.Constexpr, span: KeySpan, token, warp, lane,
        place: RingPlace,
    ):  # fmt: skip
        """Copy a warp's rows of all key tiles of a work tile; a tile is handed over before the one
        `AHEAD` later is asked for.

        Half of the lanes look the rows of a tile up, the others those of the next one.
        """
        keys, info, kv, start = ctx.params.keys, ctx.info, ctx.pipelines.kv, ctx.smem.kv_start
        row, own, last = warp * WARP_KEYS + lane % WARP_KEYS, lane // WARP_KEYS, span.last
        values = cute.make_rmem_tensor((4, ROPE_STEPS), Uint32)
        values.fill(0)
        inverse, slot = Uint32(0), Int32(0)
        word = keys.fetch(span, token, span.first + own, row, KEYS)
        address, scale_address = self._look_up(keys, span, span.first + own, row, word)
        following, following_scales = address, scale_address
        scales = load_scales(scale_address)
        word = keys.fetch(span, token, span.first + TILES + own, row, KEYS)
        for i in cutlass.range(span.first, last + AHEAD, unroll=1):
            # ---- rotated values of the tile before, which have arrived
            if span.first < i and i <= last:
                self._store_rope(start, slot, values, inverse, warp, lane)
            # ---- a tile that has arrived
            if i >= span.first + AHEAD:
                cute.arch.cp_async_wait_group(AHEAD - 1)
                # Products read it through the async proxy.
                cute.arch.fence_view_async_shared()
                kv.producer_commit(place.state(stages, -AHEAD))
            if i < last:
                # ---- copies of this tile; what names those after it
                turn = (i - span.first) % TILES * WARP_KEYS
                byte = scale_byte(cute.arch.shuffle_sync(scales, turn + lane % WARP_KEYS))
                is_key = cute.arch.vote_ballot_sync(address != 0) >> turn
                is_window = i >= span.compressed_tiles
                info.send_keys(
                    place.tiles, is_key, is_window, scale_of(byte), warp, lane, WARP_KEYS
                )
                kv.producer_acquire(place.state(stages))
                slot = place.slot
                self._copy_codes(start, slot, address, turn, warp, lane)
                self._load_rope(values, address, turn, lane)
                inverse = reciprocal_bf16x2(byte)
                if turn == 0:
                    tile = i + TILES + own
                    following, following_scales = self._look_up(keys, span, tile, row, word)
                    word = keys.fetch(span, token, tile + TILES, row, KEYS)
                else:
                    address = following
                    scales = load_scales(following_scales)
            cute.arch.cp_async_commit_group()
            place = place.next(stages)
        return place.back(stages)

    @cute.jit
    def _look_up(self, keys: PagedKeys, span: KeySpan, tile, row, word) -> tuple:
        """Addresses of a row of a key tile and of its scales; past the last one 0."""
        address, scales = Int64(0), Int64(0)
        if tile < span.last:
            address, scales = keys.addresses(span, tile, row, word, KEYS, ENTRY)
        return address, scales

    def _copy_codes(self, start: cute.Pointer, slot, address, turn, warp, lane) -> None:
        """Ask for the codes of the warp's rows: a span of all of them at a time.

        Args:
            address: of row `lane - turn` of the warp's, or 0.
        """
        vectors = vectors_per_span(CODE_SPAN)
        row, vector = lane // vectors, lane % vectors
        source = cute.arch.shuffle_sync(address, turn + row)
        size = cutlass.select_(source != 0, Int32(VECTOR_BYTES), Int32(0))
        source += self.half * HALF_CODES + vector * VECTOR_BYTES
        target = Int32(start.toint()) + slot * STAGE_BYTES
        target += vector_offset(warp * WARP_KEYS + row, vector, CODE_SPAN)
        for i in range(SPANS):
            copy_vector(target, source, size, i * KEYS * CODE_SPAN, i * CODE_SPAN)

    def _load_rope(self, values: cute.Tensor, address, turn, lane) -> None:
        """Ask for the rotated values of the warp's rows."""
        offset = self.half * ROPE_SPAN + lane % ROPE_VECTORS * VECTOR_BYTES
        for step in range(ROPE_STEPS):
            source = turn + step * ROPE_ROWS + lane // ROPE_VECTORS
            record = cute.arch.shuffle_sync(address, source)
            load_words(record, values[None, step], offset, ENTRY.codes)

    def _store_rope(
        self, start: cute.Pointer, slot, values: cute.Tensor, inverse, warp, lane
    ) -> None:
        """Write the rotated values of the warp's rows over the scales of their keys.

        Args:
            inverse: of the scale of row `lane % 16` of the warp's, twice.
        """
        row = lane // ROPE_VECTORS
        target = Int32(start.toint()) + slot * STAGE_BYTES + CODE_BYTES
        target += vector_offset(warp * WARP_KEYS + row, lane % ROPE_VECTORS, ROPE_SPAN)
        for step in range(ROPE_STEPS):
            factor = cute.arch.shuffle_sync(inverse, step * ROPE_ROWS + row)
            words = [multiply_bf16x2(values[k, step], factor) for k in range(4)]
            # Rows 8 apart are swizzled alike.
            store_vector(target, step * ROPE_ROWS * ROPE_SPAN, words)
