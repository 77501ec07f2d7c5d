"""Gather of FP8 entries into key tiles: codes become bf16 on their way through registers.

A thread has a quarter of each 64-column span of its rows: a piece of 16 codes, or two pieces of the
rotated values. Pieces of the next tiles are under way while this one's are converted: in registers,
or by cp.async in shared memory of the thread's warp, whose lanes copy rows as they lie: neighbours
have neighbouring vectors. Whatever is converted makes room for more, which is asked for at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.key_tiles import TILE_KEYS as KEYS
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.kit.gather import copy_vector, vector_offset
from dsv4.kernels.kit.kv_entry import GROUP, Fp8Entry
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.quant import dequantize_e4m3, scale_bf16x2, scale_or_nan
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.vectors import LINE_BYTES, prefetch_l2

ELEMENT_BYTES = 2  # of what the tiles hold
QUARTERS = 4  # lanes that have a row's span together
SPAN_ROWS = 32 // QUARTERS  # rows of an instruction
SPAN_BYTES = GROUP * ELEMENT_BYTES


class Segment(NamedTuple):
    """Neighbouring vectors of a row that are copied together into shared memory.

    Rows that start at the same bank swap vectors in every other one, so that lanes that read the
    same piece of two rows meet in no bank.
    """

    pieces: tuple[int, ...]
    first: int  # vector of the row
    vectors: int
    start: int  # byte offset in a warp's shared memory
    flip: int  # of vector numbers, in odd rows


class Fp8Rows:
    """Rows that are converted from entries.

    Args:
        head_dim: of the entries.
        unit_dim: columns of a slot.
        staged: pieces that wait in shared memory, the others do in registers; see `pieces`.
        ahead: key tiles on their way while one is converted; of more than one, all is staged.
        warps: that gather a tile.
    """

    is_complete = True

    def __init__(self, head_dim: int, unit_dim: int, staged: Sequence[int], ahead: int, warps: int):
        self.threads, self.warp_keys = 32 * warps, KEYS // warps
        self.rows = self.warp_keys // SPAN_ROWS  # of a thread, 8 apart
        self.entry = Fp8Entry(head_dim)
        self.unit_bytes = KEYS * unit_dim * ELEMENT_BYTES
        self.chunks = unit_dim // GROUP
        self.staged, self.ahead = tuple(staged), ahead
        pieces = range(self.entry.groups + 2)
        self.in_registers = tuple(piece for piece in pieces if piece not in self.staged)
        assert ahead == 1 or not self.in_registers, f"registers hold one tile, {ahead} wait"
        self.segments = self._make_segments(head_dim // unit_dim)

    def prefetch(self, address, scales, lane) -> None:
        """Ask for the rows of a warp to be brought into L2: lane `n % warp_keys` of each has the
        address of row n, or 0."""
        turns = 32 // self.warp_keys
        for first in range(0, self.entry.record_bytes, turns * LINE_BYTES):
            offset = cutlass.min(first + lane // self.warp_keys * LINE_BYTES, self.last_offset)
            prefetch_line(address, offset)
        prefetch_line(scales, 0)

    @property
    def last_offset(self) -> int:
        """Of a record's last byte."""
        return self.entry.record_bytes - 1

    def _make_segments(self, units: int) -> dict[int, list[Segment]]:
        """What is staged of a row, by the unit whose conversion makes room for it.

        Longer segments cross fewer lines of L2. Where two tiles are on their way, a row is one.
        """
        by_unit = {unit: [] for unit in range(units)}
        start = 0
        whole = [[*range(self.entry.groups + 2)]] if self.ahead == 2 else []
        for unit in range(units):
            staged = [piece for piece, _ in self.pieces(unit) if piece in self.staged]
            for pieces in whole if self.ahead == 2 else [staged]:
                if not pieces or (self.ahead == 2 and unit < units - 1):
                    continue
                first = self._vector(pieces[0])
                vectors = self._vector(pieces[-1]) + 1 - first
                vectors += 6 if pieces[-1] > self.entry.groups else 3
                is_rope = pieces[0] >= self.entry.groups
                flip = 0 if vectors % 8 else (1 if is_rope else QUARTERS)
                segment = Segment(tuple(pieces), first, vectors, start, flip)
                by_unit[unit].append(segment)
                start += self.warp_keys * vectors * VECTOR_BYTES
        self.warp_bytes = start
        return by_unit

    def _vector(self, piece: int) -> int:
        """Vector of a row that the first of four lanes has of a piece."""
        v = piece - self.entry.groups
        return piece * QUARTERS if v < 0 else self.entry.codes // VECTOR_BYTES + v

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
        self, slots, keys: PagedKeys, span: KeySpan, token, word, warp, lane, kv: Cursor, q=None,
    ):  # fmt: skip
        """Convert a warp's rows of all key tiles of a split; see `Bf16Rows`.

        Args:
            slots: of a ring, such as `sm90.gather_slots.HeadsMSlots`.
            q: a `QLoad`, sent when the first key tile has been asked for.
        """
        ahead, units = self.ahead, slots.units
        row = warp * self.warp_keys + lane % self.warp_keys
        last = span.first + span.count
        shape = (4, self.rows, max(len(self.in_registers), 1))
        registers = cute.make_rmem_tensor(shape, cutlass.Uint32)
        # Of the tile that is converted, and of those on their way.
        scales = cute.make_rmem_tensor((2, self.rows, ahead + 1), cutlass.Uint32)
        records = [cutlass.Int64(0) for _ in range(self.rows)]
        are_keys = cute.make_rmem_tensor(ahead + 1, cutlass.Int32)
        are_keys.fill(0)
        start = cutlass.Int32(slots.staging.toint())
        start += warp * self.warp_bytes
        staging = cutlass.Int32(0)
        for i in cutlass.range(span.first - ahead, last, unroll=1):
            # ---- addresses of the next tile, words of the one after it ----
            address, scale_address = cutlass.Int64(0), cutlass.Int64(0)
            if i + ahead < last:
                address, scale_address = keys.addresses(
                    span, i + ahead, row, word, KEYS, self.entry
                )
            if i + ahead + 1 < last:
                word = keys.fetch(span, token, i + ahead + 1, row, KEYS)
            for n in cutlass.range_constexpr(ahead):
                are_keys[n] = are_keys[n + 1]
            are_keys[ahead] = cutlass.Int32(cute.arch.vote_ballot_sync(address != 0))
            for r in cutlass.range_constexpr(self.rows):
                for n in cutlass.range_constexpr(ahead):
                    for k in cutlass.range_constexpr(2):
                        scales[k, r, n] = scales[k, r, n + 1]
                source = r * SPAN_ROWS + lane // QUARTERS
                records[r] = cute.arch.shuffle_sync(address, source)
                scale_record = cute.arch.shuffle_sync(scale_address, source)
                load_words(scale_record, scales[None, r, ahead])
            # ---- this tile, if there is one, makes room for the next ----
            for u in cutlass.range_constexpr(len(units)):
                unit = units[u]
                if i >= span.first:
                    slots.acquire(kv, unit)
                    slot = slots.slot(kv, unit)
                    if cutlass.const_expr(self.staged):
                        # What was asked for last may still be on its way.
                        cute.arch.cp_async_wait_group(self._groups_behind(u, len(units)))
                        cute.arch.sync_warp()
                    target = cutlass.Int32(slots.kv_start.toint()) + slot * self.unit_bytes
                    self._convert_unit(target, registers, scales, start + staging, unit, warp, lane)
                    cute.arch.fence_view_async_shared()
                    if cutlass.const_expr(u == 0):
                        is_window = i >= span.compressed_tiles
                        slots.describe_rows(kv, are_keys[0], is_window, warp, lane, self.warp_keys)
                    slots.commit(slot, lane)
                if i + ahead < last:
                    self._load_unit(registers, records, address, start + staging, unit, lane)
                if cutlass.const_expr(self.staged):
                    cute.arch.cp_async_commit_group()
            if cutlass.const_expr(q is not None):  # noqa: SIM102 static, then dynamic
                if i + ahead == span.first:
                    q.send(warp, lane)
            if cutlass.const_expr(ahead == 2):
                staging = self._tile_staging_bytes - staging
            if i >= span.first:
                kv = slots.next(kv)
        return kv

    def _groups_behind(self, u: int, units: int) -> int:
        """Groups of copies that may be on their way when the unit that is converted as number u has
        arrived: those of later tiles, and of units that make room earlier."""
        if self.ahead == 2:
            # A tile is asked for with its last unit's group.
            return u + units
        return units - 1

    @property
    def _tile_staging_bytes(self) -> int:
        """Bytes of what is staged of a key tile."""
        return self.warp_bytes * (KEYS // self.warp_keys)

    def _load_unit(
        self, registers: cute.Tensor, records, address, staging, unit: int, lane
    ) -> None:
        """Ask for what a converted unit has made room for.

        Args:
            records: addresses of the thread's rows.
            address: of row `lane % warp_keys` of the warp's.
        """
        quarter = lane % QUARTERS
        for piece, _ in self.pieces(unit):
            if piece in self.in_registers:
                # Lanes have neighbouring vectors of codes, every other one of rotated values.
                step = VECTOR_BYTES if piece < self.entry.groups else 2 * VECTOR_BYTES
                for r, record in enumerate(records):
                    target = registers[None, r, self.in_registers.index(piece)]
                    load_words(record, target, quarter * step, self._vector(piece) * VECTOR_BYTES)
        for segment in self.segments[unit]:
            self._copy_segment(segment, address, staging, lane)

    def _copy_segment(self, segment: Segment, address, staging, lane) -> None:
        """Copy some vectors of all rows of the warp; lanes have neighbouring ones."""
        vectors, first_offset = segment.vectors, segment.first * VECTOR_BYTES
        for n in range(self.warp_keys * vectors // 32):
            row, column = _divide(n * 32, lane, vectors)
            place = n * 32 + lane
            if segment.flip:
                place = place ^ (row % 2 * segment.flip)
            source = cute.arch.shuffle_sync(address, row)
            size = cutlass.select_(source != 0, cutlass.Int32(VECTOR_BYTES), cutlass.Int32(0))
            target = staging + place * VECTOR_BYTES
            copy_vector(target, source + column * VECTOR_BYTES, size, segment.start, first_offset)

    def _staged_at(self, r: int, piece: int, lane):
        """Byte offset of the thread's vector of a staged piece of its row r."""
        segment = next(s for found in self.segments.values() for s in found if piece in s.pieces)
        row, quarter = r * SPAN_ROWS + lane // QUARTERS, lane % QUARTERS
        # Lanes have neighbouring vectors of codes, and every other one of rotated values.
        vector = self._vector(piece) - segment.first
        step = quarter if piece < self.entry.groups else 2 * quarter
        place = (vector + step) ^ (row % 2 * segment.flip) if segment.flip else vector + step
        return segment.start + (row * segment.vectors + place) * VECTOR_BYTES

    def _convert_unit(self, start, registers, scales, staging, unit: int, warp, lane) -> None:
        """Write a thread's pieces of a unit as bf16.

        Args:
            start: of the unit's slot.
        """
        row = warp * self.warp_keys + lane // QUARTERS
        start = start + vector_offset(row, lane % QUARTERS * 2, SPAN_BYTES)
        parts = [(r, piece, chunk) for r in range(self.rows) for piece, chunk in self.pieces(unit)]
        # All of them first: the compiler moves no load across the stores, which may alias it.
        loaded = [self._words(registers, staging, r, piece, lane) for r, piece, _ in parts]
        for (r, piece, chunk), words in zip(parts, loaded, strict=True):
            offset = (r * SPAN_ROWS + chunk * KEYS) * SPAN_BYTES
            v = piece - self.entry.groups
            if v < 0:
                byte = cutlass.Int32((scales[piece // 4, r, 0] >> piece % 4 * 8) & 0xFF)
                # A row with a NaN is NaN to every head, as key and as value: it may be all NaN.
                scale = scale_or_nan(words, scale_bf16x2(byte))
                pairs = [x for word in words for x in dequantize_e4m3(word, scale)]
                vectors = [(k, pairs[4 * k : 4 * k + 4]) for k in range(2)]
            else:
                vectors = [(v, words)]
            for k, pairs in vectors:
                # The swizzle of the vector beside differs in the last bit.
                store_vector(start ^ VECTOR_BYTES if k else start, offset, pairs)

    def _words(self, registers: cute.Tensor, staging, r: int, piece: int, lane) -> list:
        """A thread's piece of row r, which has arrived."""
        if piece in self.staged:
            return load_staged(staging + self._staged_at(r, piece, lane))
        place = self.in_registers.index(piece)
        return [registers[k, r, place] for k in range(4)]


def _divide(first: int, lane, divisor: int) -> tuple:
    """Quotient and remainder of `first + lane`: by comparisons, a division would take longer."""
    quotient = cutlass.Int32(first // divisor)
    for multiple in range(first // divisor + 1, (first + 31) // divisor + 1):
        is_beyond = lane >= multiple * divisor - first
        quotient = cutlass.select_(is_beyond, cutlass.Int32(multiple), quotient)
    return quotient, first + lane - quotient * divisor


@cute.jit
def prefetch_line(address, offset) -> None:
    """Ask for a line of a row, if there is one."""
    if address != 0:
        prefetch_l2(address + cutlass.Int64(offset))


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


def load_staged(address) -> list:
    """Load 16 bytes of shared memory that this thread's warp has had copied there."""
    names = ", ".join(f"{{$w{k}}}" for k in range(4))
    words = cute.arch.inline_ptx(
        f"ld.shared.v4.b32 {{{names}}}, [{{$r0}}];",
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
