"""Gather of bf16 rows into key tiles, by cp.async."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.gather_slots import HeadsMSlots, SwapAbSlots
from dsv4.kernels.attention.sm90.plan import ELEMENT_BYTES, GATHER_WARPS, KEYS
from dsv4.kernels.kit.gather import copy_vector, vector_offset, vectors_per_span
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

WARP_KEYS = KEYS // GATHER_WARPS  # rows of a key tile that each warp has


class Bf16Rows:
    """Rows that are copied as they are.

    Args:
        unit_dim: columns of a slot.
        chunk: columns of a swizzle span.
    """

    # Whether a copy is complete before its thread arrives; else a product fences after its wait.
    is_complete = False
    entry = None
    warp_keys = WARP_KEYS

    def __init__(self, unit_dim: int, chunk: int):
        self.unit_bytes = KEYS * unit_dim * ELEMENT_BYTES
        self.chunk_bytes = chunk * ELEMENT_BYTES
        self.chunks = unit_dim // chunk

    def prefetch(self, address, scales, lane) -> None:
        """See `Fp8Rows`: rows of bf16 are many lines, which their loads ask for soon enough."""

    @cute.jit
    def gather_tiles(
        self, slots: HeadsMSlots | SwapAbSlots, keys: PagedKeys, span: KeySpan, token, word, warp,
        lane, kv: Cursor,
    ):  # fmt: skip
        """Copy a warp's rows of all key tiles of a split.

        Args:
            word: of row `lane % 16` of the warp's in the first tile.
        """
        row = warp * WARP_KEYS + lane % WARP_KEYS
        last = span.first + span.count
        for i in cutlass.range(span.first, last, unroll=1):
            address, _ = keys.addresses(span, i, row, word, KEYS, None)
            # The next tile's words are under way beside the rows of this one.
            if i + 1 < last:
                word = keys.fetch(span, token, i + 1, row, KEYS)
            is_window = i >= span.compressed_tiles
            for unit in cutlass.range_constexpr(len(slots.units)):
                self._copy_unit(slots, slots.units[unit], address, is_window, warp, lane, kv)
            kv = slots.next(kv)
        return kv

    @cute.jit
    def _copy_unit(
        self, slots, unit: cutlass.Constexpr, address, is_window, warp, lane, kv: Cursor
    ):
        """Copy a warp's rows of some columns, when their slot is empty.

        Args:
            address: of row `lane % 16` of the warp's, or 0.
        """
        vectors = vectors_per_span(self.chunk_bytes)
        rows = 32 // vectors  # of one instruction
        row, vector = lane // vectors, lane % vectors
        first = vector_offset(warp * WARP_KEYS + row, vector, self.chunk_bytes)
        slots.acquire(kv, unit)
        slot = slots.slot(kv, unit)
        start = cutlass.Int32(slots.kv_start.toint()) + slot * self.unit_bytes + first
        for step in cutlass.range_constexpr(WARP_KEYS // rows):
            source = cute.arch.shuffle_sync(address, step * rows + row)
            size = cutlass.select_(source != 0, cutlass.Int32(VECTOR_BYTES), cutlass.Int32(0))
            source += vector * VECTOR_BYTES
            # Of spans of 128 bytes, rows 4 apart differ in the last bit but two of the swizzle.
            flip = step % 2 * 64 if vectors == 8 else 0
            target = start ^ flip if flip else start
            for chunk in cutlass.range_constexpr(self.chunks):
                copy_vector(
                    *(target, source, size),
                    (step * rows + chunk * KEYS) * self.chunk_bytes,
                    (unit * self.chunks + chunk) * self.chunk_bytes,
                )
        cute.arch.cp_async_mbarrier_arrive_noinc(slots.ctx.pipes.kv.full + slot)
        if cutlass.const_expr(unit == slots.units[0]):
            is_key = cute.arch.vote_ballot_sync(address != 0)
            slots.describe_rows(kv, is_key, is_window, warp, lane, WARP_KEYS)
        slots.commit(slot, lane)
