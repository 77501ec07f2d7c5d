"""Gather of FP8 entries into key tiles: codes become bf16 on their way through registers.

A thread has a quarter of each 64-column span of two rows: a piece of 16 codes, or two pieces of the
rotated values. Pieces of the next tile are under way while this one's are converted: in registers,
or by cp.async in shared memory of the thread's own. Whatever is converted is asked for again at
once, of the next tile.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.sm90.gather_slots import (
    HeadsMSlots,
    SwapAbSlots,
    commit,
    describe_rows,
)
from dsv4.kernels.attention.sm90.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.plan import ELEMENT_BYTES, GATHER_WARPS, KEYS, WARP_KEYS
from dsv4.kernels.kit.gather import copy_vector, vector_offset
from dsv4.kernels.kit.kv_entry import GROUP, Fp8Entry
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.quant import dequantize_e4m3, scale_bf16x2
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

ROWS = 2  # of a thread, 8 apart
QUARTERS = 4  # lanes that have a row's span together
SPAN_ROWS = 32 // QUARTERS  # rows of an instruction
SPAN_BYTES = GROUP * ELEMENT_BYTES


class Fp8Rows:
    """Converts entries.

    Args:
        head_dim: of the entries.
        unit_dim: columns of a slot.
        staged: pieces that wait in shared memory, the others do in registers; see `pieces`.
    """

    is_complete = True

    def __init__(self, head_dim: int, unit_dim: int, staged: Sequence[int]):
        self.entry = Fp8Entry(head_dim)
        self.unit_bytes = KEYS * unit_dim * ELEMENT_BYTES
        self.chunks = unit_dim // GROUP
        self.staged = tuple(staged)
        pieces = range(self.entry.groups + 2)
        self.in_registers = tuple(piece for piece in pieces if piece not in self.staged)

    def pieces(self, unit: int) -> list[tuple[int, int]]:
        """(piece, chunk of the unit) of a row's pieces in a unit: groups of codes by their number,
        then the two halves of a quarter of the rotated values."""
        groups = self.entry.groups
        chunks = range(unit * self.chunks, (unit + 1) * self.chunks)
        found = [(chunk, chunk % self.chunks) for chunk in chunks if chunk < groups]
        if groups in chunks:
            found += [(groups, self.chunks - 1), (groups + 1, self.chunks - 1)]
        return found

    @cute.jit
    def gather_tiles(
        self, slots: HeadsMSlots | SwapAbSlots, keys: PagedKeys, span: KeySpan, token, word, warp,
        lane, kv: Cursor,
    ):  # fmt: skip
        """Convert a warp's rows of all key tiles of a split; see `Bf16Rows`."""
        row = warp * WARP_KEYS + lane % WARP_KEYS
        last = span.first + span.count
        registers = cute.make_rmem_tensor((4, ROWS, len(self.in_registers)), cutlass.Uint32)
        scales, next_scales = (cute.make_rmem_tensor((2, ROWS), cutlass.Uint32) for _ in range(2))
        staging = cutlass.Int32(0)
        if cutlass.const_expr(len(self.staged) > 0):
            staging = cutlass.Int32(slots.ctx.smem.staging.toint())
            staging += (warp * 32 + lane) * VECTOR_BYTES
        is_key, next_is_key = cutlass.Int32(0), cutlass.Int32(0)
        records = [cutlass.Int64(0) for _ in range(ROWS)]
        for i in cutlass.range(span.first - 1, last, unroll=1):
            # ---- addresses of the next tile, words of the one after it ----
            address, scale_address = cutlass.Int64(0), cutlass.Int64(0)
            if i + 1 < last:
                address, scale_address = keys.addresses(span, i + 1, row, word, KEYS, self.entry)
            if i + 2 < last:
                word = keys.fetch(span, token, i + 2, row, KEYS)
            is_key = next_is_key
            next_is_key = cutlass.Int32(cute.arch.vote_ballot_sync(address != 0))
            for r in cutlass.range_constexpr(ROWS):
                source = r * SPAN_ROWS + lane // QUARTERS
                records[r] = cute.arch.shuffle_sync(address, source)
                scales[0, r], scales[1, r] = next_scales[0, r], next_scales[1, r]
                load_words(cute.arch.shuffle_sync(scale_address, source), next_scales[None, r])
            # ---- this tile, if there is one, makes room for the next ----
            for u in cutlass.range_constexpr(len(slots.units)):
                unit = slots.units[u]
                if i >= span.first:
                    slots.acquire(kv, unit)
                    slot = slots.slot(kv, unit)
                    if cutlass.const_expr(len(self.staged) > 0):
                        # What was asked for less than a tile ago may still be on its way.
                        cute.arch.cp_async_wait_group(len(slots.units) - 1)
                    start = cutlass.Int32(slots.ctx.smem.kv_start.toint()) + slot * self.unit_bytes
                    self._convert_unit(start, registers, scales, staging, unit, warp, lane)
                    cute.arch.fence_view_async_shared()
                    if cutlass.const_expr(u == 0):
                        is_window = i >= span.compressed_tiles
                        describe_rows(slots, kv, is_key, is_window, warp, lane)
                    commit(slots, slot, lane)
                if i + 1 < last:
                    self._load_unit(registers, records, staging, unit, lane)
                if cutlass.const_expr(len(self.staged) > 0):
                    cute.arch.cp_async_commit_group()
            if i >= span.first:
                kv = slots.next(kv)
        return kv

    def _load_unit(self, registers: cute.Tensor, records, staging, unit: int, lane) -> None:
        """Ask for a thread's pieces of a unit."""
        quarter = lane % QUARTERS
        for r, record in enumerate(records):
            size = cutlass.select_(record != 0, cutlass.Int32(VECTOR_BYTES), cutlass.Int32(0))
            for piece, _ in self.pieces(unit):
                v = piece - self.entry.groups
                lane_offset = quarter * (VECTOR_BYTES if v < 0 else 2 * VECTOR_BYTES)
                offset = piece * GROUP if v < 0 else self.entry.codes + v * VECTOR_BYTES
                if piece in self.staged:
                    place = self._staged_at(r, piece)
                    copy_vector(staging, record + lane_offset, size, place, offset)
                else:
                    target = registers[None, r, self.in_registers.index(piece)]
                    load_words(record, target, lane_offset, offset)

    def _staged_at(self, r: int, piece: int) -> int:
        """Byte offset of one of a thread's staged pieces of row r."""
        place = r * len(self.staged) + self.staged.index(piece)
        return place * 32 * GATHER_WARPS * VECTOR_BYTES

    def _convert_unit(self, start, registers, scales, staging, unit: int, warp, lane) -> None:
        """Write a thread's pieces of a unit as bf16.

        Args:
            start: of the unit's slot.
        """
        row = warp * WARP_KEYS + lane // QUARTERS
        start = start + vector_offset(row, lane % QUARTERS * 2, SPAN_BYTES)
        parts = [(r, piece, chunk) for r in range(ROWS) for piece, chunk in self.pieces(unit)]
        # All of them first: the compiler moves no load across the stores, which may alias it.
        loaded = [self._words(registers, staging, r, piece) for r, piece, _ in parts]
        for (r, piece, chunk), words in zip(parts, loaded, strict=True):
            offset = (r * SPAN_ROWS + chunk * KEYS) * SPAN_BYTES
            v = piece - self.entry.groups
            if v < 0:
                byte = cutlass.Int32((scales[piece // 4, r] >> piece % 4 * 8) & 0xFF)
                scale = scale_bf16x2(byte)
                pairs = [x for word in words for x in dequantize_e4m3(word, scale)]
                vectors = [(k, pairs[4 * k : 4 * k + 4]) for k in range(2)]
            else:
                vectors = [(v, words)]
            for k, pairs in vectors:
                # The swizzle of the vector beside differs in the last bit.
                store_vector(start ^ VECTOR_BYTES if k else start, offset, pairs)

    def _words(self, registers: cute.Tensor, staging, r: int, piece: int) -> list:
        """A thread's piece of row r, which has arrived."""
        if piece in self.staged:
            return load_staged(staging, self._staged_at(r, piece))
        place = self.in_registers.index(piece)
        return [registers[k, r, place] for k in range(4)]


def load_words(address, target: cute.Tensor, lane_offset=0, offset: int = 0) -> None:
    """Load 8 or 16 bytes of global memory that no launch beside writes, or zeros from address 0."""
    count = cute.size(target)
    names = [f"{{$w{k}}}" for k in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    words = cute.arch.inline_ptx(
        f"{zeros} @{{$r1}} ld.global.nc.L1::no_allocate.v{count}.b32 "
        f"{{{', '.join(names)}}}, [{{$r0}}+{offset}];",
        write_only_types=[cutlass.Uint32] * count,
        read_only_args=[address + lane_offset, address != 0],
    )
    for k in range(count):
        target[k] = words[k]


def load_staged(address, offset: int) -> list:
    """Load 16 bytes of shared memory that this thread has had copied there."""
    names = ", ".join(f"{{$w{k}}}" for k in range(4))
    words = cute.arch.inline_ptx(
        f"ld.shared.v4.b32 {{{names}}}, [{{$r0}}+{offset}];",
        write_only_types=[cutlass.Uint32] * 4,
        read_only_args=[address],
    )
    return list(words)


def store_vector(address, offset: int, words) -> None:
    """Write 16 bytes to shared memory."""
    names = ", ".join(f"{{$r{k + 1}}}" for k in range(4))
    cute.arch.inline_ptx(
        f"st.shared.v4.b32 [{{$r0}}+{offset}], {{{names}}};", read_only_args=[address, *words]
    )
