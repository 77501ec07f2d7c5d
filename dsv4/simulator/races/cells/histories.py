"""Last writes and reads of each cell of an allocation in global memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.machine.memory import Region
from dsv4.simulator.races.cells.shadow import SEVERAL, Cells, other_lanes

# In place of an owner: EARLIER_LAUNCH is complete after griddepcontrol.wait; UNAWAITED_LAUNCH, one
# before it that it did not wait for, may be running all the time.
UNTOUCHED, EARLIER_LAUNCH, UNAWAITED_LAUNCH = -1, -2, -3
_MAX_READS = 20_000


class Read(NamedTuple):
    """Cells that an owner has read at a time of its clock."""

    cells: np.ndarray
    base: int  # added to the cells
    owner: int
    clock: int
    code: object  # place, or places


class Footprint(NamedTuple):
    """Words of an allocation, one bool each."""

    written: np.ndarray
    read: np.ndarray
    atomic: np.ndarray

    def conflicts(self, other: Footprint) -> bool:
        """Whether one of the two writes what the other one touches."""
        touched = self.written | self.read | self.atomic
        theirs = other.written | other.read | other.atomic
        return bool((self.written & theirs | other.written & touched).any())


class History(Cells):
    """Last write and last two reads of each cell of one allocation."""

    tables = (
        "writer", "write_clock", "write_at", "reader", "read_clock", "read_at", "incoherent",
        "undefined",
    )  # fmt: skip

    def __init__(self, region: Region):
        count = (region.stop - region.start + 3) // 4
        super().__init__(count)
        self.region = region
        self.written = self.read = False
        self.writer = np.full(count, UNTOUCHED, np.int64)
        self.write_clock = np.zeros(count, np.int32)
        self.write_at = np.zeros(count, np.int32)
        self.reader = np.full((2, count), UNTOUCHED, np.int64)
        self.read_clock = np.zeros((2, count), np.int32)
        self.read_at = np.zeros((2, count), np.int32)
        self.reads: list[Read] = []
        # Place of a non-coherent read of the cell, plus one; None until there is one.
        self.incoherent: np.ndarray | None = None
        # Cells whose contents before the launch mean nothing; None if there are none.
        self.undefined: np.ndarray | None = None
        self._atomics: History | None = None
        self._strong_reads: History | None = None
        self.polled: tuple | None = None  # of strong reads: what the last one was

    def atomics(self, *, needed: bool) -> History | None:
        """The last atomic on each word, as a history of its own; None while there is none."""
        if self._atomics is None and needed:
            self._atomics = History(self.region)
        return self._atomics

    def strong_reads(self, *, needed: bool) -> History | None:
        """The last strong loads of each word, as `atomics`."""
        if self._strong_reads is None and needed:
            self._strong_reads = History(self.region)
        return self._strong_reads

    def footprint(self, *, earlier: bool = False) -> Footprint:
        """Words that ordinary and asynchronous accesses wrote, that they read, and that atomics
        touched; those of `earlier` launches instead of those of this one, if asked for."""
        self.settle_reads()
        others = self.atomics(needed=False)
        written = self._words(self.writer, earlier)
        touched = np.zeros_like(written)
        if others is not None:
            touched = others._words(others.writer, earlier)
        read = self._words(self.reader[0], earlier)
        strong = self.strong_reads(needed=False)
        if strong is not None:
            strong.settle_reads()
            read |= strong._words(strong.reader[0], earlier)
        return Footprint(written, read, touched)

    def _words(self, table: np.ndarray, earlier: bool) -> np.ndarray:
        known = table < UNTOUCHED if earlier else table >= 0
        words = known[: self.count].copy()
        bytes_of = known[self.count : self.count + 4 * len(self.owners)]
        if len(bytes_of):
            words[self.owners] = bytes_of.reshape(-1, 4).any(1)
        return words

    def follow(self, done: Footprint, owner: int) -> None:
        """Take over what was done to the allocation elsewhere."""
        self.writer[: self.count][done.written | done.atomic] = owner
        self.reader[0, : self.count][done.read] = owner
        self.written = bool((self.writer != UNTOUCHED).any())
        self.read = self.read or bool(done.read.any())

    def touch(self, start: int, stop: int) -> None:
        """Count bytes [start, stop) of the allocation as written and read, by no warp in
        particular."""
        words = np.zeros(self.count, np.bool_)
        words[start // 4 : -(-stop // 4)] = True
        self.follow(Footprint(words, words, np.zeros_like(words)), 0)

    def untouched(self, where, write: bool) -> bool:
        """None wrote any of the cells, nor (for a `write`) read anything of the allocation; the
        reads are settled."""
        if write and self.read:
            return False
        return not self.written or int(np.maximum.reduce(self.writer[where])) == UNTOUCHED == int(
            np.minimum.reduce(self.writer[where])
        )

    def note_read(self, read: Read) -> None:
        """Record a read."""
        self.reads.append(read)
        if len(self.reads) > _MAX_READS:
            self.settle_reads()

    def settle_reads(self) -> None:
        """Enter the listed reads into the tables."""
        reads, self.reads = self.reads, []
        self.read = self.read or bool(reads)
        for cells, base, owner, clock, code in reads:
            where = cells + base if base else cells
            if self.split is not None:
                where, code = self._refined_places(where, code)
            other = where[self.reader[0, where] != owner]
            for table in (self.reader, self.read_clock, self.read_at):
                table[1, other] = table[0, other]
            again = (self.reader[0, where] == owner) & (self.read_clock[0, where] == clock)
            mixed = again & other_lanes(self.read_at[0, where], code)
            self.reader[0, where] = owner
            self.read_clock[0, where] = clock
            self.read_at[0, where] = code
            mixed |= self.read_at[0, where] != code
            several = where[mixed]
            self.read_at[0, several] = self.read_at[0, several] & ~63 | SEVERAL

    def _refined_places(self, where: np.ndarray, code):
        pool = where >= self.count
        whole, lanes = self._refined(where[~pool], code[~pool] if np.ndim(code) else code)
        if np.ndim(code):
            return np.concatenate([whole, where[pool]]), np.concatenate([lanes, code[pool]])
        return np.concatenate([whole, where[pool]]), code

    def note_incoherent(self, where, code) -> None:
        """Record a non-coherent read."""
        if self.incoherent is None:
            self.incoherent = np.zeros_like(self.write_at)
        self.incoherent[where] = code + 1

    def declare_undefined(self, start: int, stop: int) -> None:
        """Bytes [start, stop) of the allocation hold nothing yet."""
        if self.undefined is None:
            self.undefined = np.zeros(self.writer.shape, np.bool_)
        self.undefined[-(-start // 4) : stop // 4] = True

    def first_undefined(self, where) -> int | None:
        """Index of the first cell that was never written and held nothing before."""
        missing = self.undefined[where] & (self.writer[where] == UNTOUCHED)
        return int(missing.argmax()) if missing.any() else None

    def note_write(self, where, owner: int, clock: int, code) -> None:
        """Record a write."""
        self.written = True
        self.writer[where] = owner
        self.write_clock[where] = clock
        self.write_at[where] = code

    def postpone(self, where, owner: int, since: np.ndarray, clock: int) -> None:
        """Accesses of `owner` since a clock that depends on the lane count as made at `clock`."""
        self.settle_reads()
        late = self.write_clock[where] >= since[self.write_at[where] & 63]
        self.write_clock[where[late & (self.writer[where] == owner)]] = clock
        late = self.read_clock[0, where] >= since[self.read_at[0, where] & 63]
        self.read_clock[0, where[late & (self.reader[0, where] == owner)]] = clock

    def postpone_weakly(self, where, owner: int, since: np.ndarray, clock: int) -> None:
        """A collective before a release counts as order here: few kernels hand over global memory
        warp by warp."""
