"""Shadow memory: last writer and readers of each cell, with logical clocks.

A cell is 4 bytes of shared memory, or 16 lanes of one TMEM column. 4-byte cells that an access of
fewer bytes touched are split: their four bytes get cells of their own, in a pool behind the others.
An access is ordered after an earlier one by agent `a` at clock `c` if the accessor's vector clock
has at least `c` at `a`. Where an access happened is an instruction and a lane, in one number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.races.cells.granules import granules

UNTOUCHED = -1
SEVERAL = 32  # in place of a lane: the warp as a whole, or more lanes than one
LANE_CODES = 64
_LANE_BITS, _LANE = 6, LANE_CODES - 1
_POOL = 1024


class Earlier(NamedTuple):
    """An access that is in conflict: the agent, its instruction, lane and clock, and which of the
    cells that were asked about. `weak`: only the lanes' convergence orders it."""

    agent: int
    at: int
    lane: int
    clock: int
    index: int
    weak: bool = False


def place(at: int, lanes):
    """Instruction and lane(s) as one number (or an array of them)."""
    return at << _LANE_BITS | lanes


def place_of(code: int) -> tuple[int, int]:
    """Instruction and lane."""
    return code >> _LANE_BITS, code & _LANE


class Cells:
    """Numbering of cells, some split into bytes. Subclasses list their arrays in `tables`, whose
    last axis is the cell."""

    tables: tuple[str, ...] = ()

    def __init__(self, count: int):
        self.count = count
        self.split: np.ndarray | None = None  # 4-byte cell -> its first byte's cell
        self.owners: list[int] = []

    def cells(self, offsets: np.ndarray, size: int, lanes) -> tuple[np.ndarray, object]:
        """Cells of `size` bytes at each offset, and the lane of each cell."""
        if size < 4:
            return self._bytes(offsets, size, lanes)
        where = granules(offsets, size)
        if size > 4 and isinstance(lanes, np.ndarray):
            lanes = np.repeat(lanes, size // 4)
        if self.split is None:
            return where, lanes
        return self._refined(where, lanes)

    def refined(self, where: np.ndarray) -> np.ndarray:
        """Cells of whole granules."""
        return where if self.split is None else self._refined(where, 0)[0]

    def words_of(self, where: np.ndarray) -> np.ndarray:
        """The granules that cells are of, or are."""
        if self.split is None or int(where.max(initial=0)) < self.count:
            return where
        owners = np.array(self.owners)[np.maximum(where - self.count, 0) // 4]
        return np.where(where < self.count, where, owners)

    def refined_of(self, where: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cells of whole granules, a lane's each, and the lane of each cell."""
        return (where, lanes) if self.split is None else self._refined(where, lanes)

    def _refined(self, where: np.ndarray, lanes):
        first = self.split[where]
        divided = first >= 0
        if not divided.any():
            return where, lanes
        fine = (first[divided][:, None] + np.arange(4)).reshape(-1)
        cells = np.concatenate([where[~divided], fine])
        if isinstance(lanes, np.ndarray):
            lanes = np.concatenate([lanes[~divided], np.repeat(lanes[divided], 4)])
        return cells, lanes

    def _bytes(self, offsets: np.ndarray, size: int, lanes):
        offsets = np.asarray(offsets, np.int64)
        if self.split is None:
            self.split = np.full(self.count, -1, np.int64)
        whole = offsets >> 2
        for granule in np.unique(whole[self.split[whole] < 0]).tolist():
            self._divide(granule)
        cells = self.split[whole] + (offsets & 3)
        if size == 1:
            return cells, lanes
        cells = (cells[:, None] + np.arange(size)).reshape(-1)
        return cells, np.repeat(lanes, size) if isinstance(lanes, np.ndarray) else lanes

    def _divide(self, granule: int) -> None:
        first = self.count + 4 * len(self.owners)
        self.owners.append(granule)
        for name in self.tables:
            table = getattr(self, name)
            if table is None:
                continue
            if first >= table.shape[-1]:
                more = np.zeros((*table.shape[:-1], 4 * _POOL), table.dtype)
                table = np.concatenate([table, more], -1)
                setattr(self, name, table)
            table[..., first : first + 4] = table[..., granule, None]
        self.split[granule] = first

    def offset(self, cell: int) -> int:
        """The byte offset of a cell."""
        if cell < self.count:
            return 4 * cell
        pool = cell - self.count
        return 4 * self.owners[pool // 4] + pool % 4


class Shadow(Cells):
    """Access history of one memory of `count` cells."""

    tables = (
        "writer", "write_clock", "write_at", "read_clock", "read_at", "weak_write", "weak_read",
        "copied",
    )  # fmt: skip

    def __init__(self, count: int):
        super().__init__(count)
        self.writer = np.full(count, UNTOUCHED, np.int32)
        self.write_clock = np.zeros(count, np.int32)
        self.write_at = np.zeros(count, np.int32)
        self.last_write: dict[int, int] = {}  # of each agent, the highest clock anywhere
        self.readers: list[int] = []
        self.last_read: list[int] = []  # of each reader, the highest clock anywhere
        self.row_of: dict[int, int] = {}  # agent -> row of the read tables
        self.read_clock = np.zeros((4, count), np.int32)
        self.read_at = np.zeros((4, count), np.int32)
        # Clocks of accesses by lanes that were only brought together with a lane that released,
        # were they to count as later; 0 for others. None until there is one.
        self.weak_write: np.ndarray | None = None
        self.weak_read: np.ndarray | None = None
        # Last writes that count as a warp's and were copies by cp.async, or by st.async. None until
        # there is one.
        self.copied: np.ndarray | None = None

    def settled(self, where, seen: np.ndarray, other: np.ndarray, engines: int | None) -> bool:
        """The common case, quickly: one agent wrote all of the cells last, and both clocks cover
        it (`other` does not matter for engines, agents from that number on)."""
        writer = self.writer[where]
        if not len(writer):
            return True
        clock = int(np.maximum.reduce(self.write_clock[where]))
        first = int(writer[0])
        if first < 0 or np.logical_or.reduce(writer != first) or clock > seen[first]:
            return False
        covered = clock <= other[first]
        if not covered and engines is not None and first >= engines:
            covered = self.copied is None or not np.logical_or.reduce(self.copied[where])
        if covered and self.weak_write is not None:
            covered = np.maximum.reduce(self.weak_write[where]) <= seen[first]
        return bool(covered)

    # --- accesses of other agents ----------------------------------------------------------------
    def unordered_write(self, where, clock: np.ndarray):
        """A last write that `clock` does not cover, or None."""
        writer = self.writer[where]
        found = self._write(where, self.write_clock[where] > clock[writer])
        if found is None and self.weak_write is not None:
            found = self._write(where, self.weak_write[where] > clock[writer], weak=True)
        return found

    def unfenced_write(self, where, fenced: np.ndarray, below: int, has_copies: bool):
        """A last write that `fenced` does not cover, by an agent `below` a number, or None;
        `has_copies`: so are copies by cp.async and st.async."""
        writer = self.writer[where]
        ordinary = writer < below
        if self.copied is not None:
            copied = self.copied[where]
            ordinary = ordinary | copied if has_copies else ordinary & ~copied
        late = (self.write_clock[where] > fenced[writer]) & ordinary
        return self._write(where, late)

    def _write(self, where, late: np.ndarray, weak: bool = False) -> Earlier | None:
        if not late.any():
            return None
        i = int(late.argmax())
        at, lane = place_of(int(self.write_at[where][i]))
        clock = int(self.write_clock[where][i])
        return Earlier(int(self.writer[where][i]), at, lane, clock, i, weak)

    def unordered_read(self, where, clock: np.ndarray, myself: int):
        """A read that `clock` does not cover, or None."""
        if not self.readers:
            return None
        for table, weak in ((self.read_clock, False), (self.weak_read, True)):
            if table is None:
                continue
            for row, agent in enumerate(self.readers):
                known = clock[agent]
                # Most readers are known of as a whole.
                if known >= self.last_read[row] or agent == myself:
                    continue
                late = table[row][where] > known
                if np.logical_or.reduce(late):
                    return self._read(row, where, int(late.argmax()), weak)
        return None

    def _read(self, row: int, where, i: int, weak: bool = False) -> Earlier:
        at, lane = place_of(int(self.read_at[row, where][i]))
        clock = int(self.read_clock[row, where][i])
        return Earlier(self.readers[row], at, lane, clock, i, weak)

    # --- accesses of other lanes of the same warp ------------------------------------------------
    def touched_by(self, agent: int, since: int, write: bool) -> bool:
        """Whether an agent wrote anything at clock `since` or later; for a `write`, or read it."""
        if self.last_write.get(agent, 0) >= since:
            return True
        row = self.row_of.get(agent) if write else None
        return row is not None and self.last_read[row] >= since

    def write_by_other_lane(self, where, lanes, agent: int, since: int):
        """The last write, if another lane of warp `agent` made it at clock `since` or later."""
        if self.last_write.get(agent, 0) < since:
            return None
        late = (self.writer[where] == agent) & (self.write_clock[where] >= since)
        if not late.any():
            return None
        late &= other_lanes(self.write_at[where], lanes)
        return self._write(where, late)

    def read_by_other_lane(self, where, lanes, agent: int, since: int):
        """A read that another lane of warp `agent` made at clock `since` or later."""
        row = self.row_of.get(agent)
        if row is None or self.last_read[row] < since:
            return None
        late = self.read_clock[row][where] >= since
        if not late.any():
            return None
        late &= other_lanes(self.read_at[row, where], lanes)
        return self._read(row, where, int(late.argmax())) if late.any() else None

    def postpone(self, where, agent: int, since: np.ndarray, clock: int) -> None:
        """Accesses of `agent` since a clock that depends on the lane count as made at `clock`."""
        late = self.write_clock[where] >= since[self.write_at[where] & _LANE]
        self.write_clock[where[late & (self.writer[where] == agent)]] = clock
        self.last_write[agent] = max(self.last_write.get(agent, 0), clock)
        row = self.row_of.get(agent)
        if row is not None:
            late = self.read_clock[row, where] >= since[self.read_at[row, where] & _LANE]
            self.read_clock[row, where[late]] = clock
            self.last_read[row] = max(self.last_read[row], clock)

    def postpone_weakly(self, where, agent: int, since: np.ndarray, clock: int) -> None:
        """As `postpone`, for lanes that were brought together with those that released."""
        late = self.write_clock[where] >= since[self.write_at[where] & _LANE]
        late &= self.writer[where] == agent
        if late.any():
            if self.weak_write is None:
                self.weak_write = np.zeros_like(self.write_clock)
            self.weak_write[where[late]] = clock
        row = self.row_of.get(agent)
        if row is None:
            return
        late = self.read_clock[row, where] >= since[self.read_at[row, where] & _LANE]
        if late.any():
            if self.weak_read is None:
                self.weak_read = np.zeros_like(self.read_clock)
            self.weak_read[row, where[late]] = clock
            self.last_read[row] = max(self.last_read[row], clock)

    def hand_over(self, where, copier: int, number: int, warp: int, clock: int) -> np.ndarray:
        """Cells of the copy with this number, which from now on a warp wrote at a clock of its."""
        where = self.refined(where)
        cells = where[(self.writer[where] == copier) & (self.write_clock[where] == number)]
        self.writer[cells], self.write_clock[cells] = warp, clock
        self.mark_copied(cells)
        self.last_write[warp] = max(self.last_write.get(warp, 0), clock)
        return cells

    def mark_copied(self, where) -> None:
        """The last writes of cells were copies, of which the asynchronous proxy must be told."""
        if self.copied is None:
            self.copied = np.zeros(self.writer.shape, np.bool_)
        self.copied[where] = True

    # --- recording -------------------------------------------------------------------------------
    def _row(self, agent: int) -> int:
        row = self.row_of.get(agent)
        if row is None:
            row = self.row_of[agent] = len(self.readers)
            self.readers.append(agent)
            self.last_read.append(0)
            if row >= len(self.read_clock):
                self.read_clock = np.concatenate([self.read_clock, np.zeros_like(self.read_clock)])
                self.read_at = np.concatenate([self.read_at, np.zeros_like(self.read_at)])
                if self.weak_read is not None:
                    more = np.zeros_like(self.weak_read)
                    self.weak_read = np.concatenate([self.weak_read, more])
        return row

    def note_read(self, where, agent: int, clock: int, code) -> None:
        """Record a read by an engine or a whole warp."""
        row = self._row(agent)
        self.last_read[row] = max(self.last_read[row], clock)
        if self.weak_read is not None:
            self.weak_read[row, where] = 0
        self.read_clock[row][where] = clock
        self.read_at[row][where] = code

    def note_lane_reads(self, where, agent: int, clock: int, code, since: int) -> None:
        """Record reads by lanes: cells that several of them read since a clock are marked."""
        row = self._row(agent)
        self.last_read[row] = max(self.last_read[row], clock)
        if self.weak_read is not None:
            self.weak_read[row, where] = 0
        table = self.read_at[row]
        again = (self.read_clock[row][where] >= since) & other_lanes(table[where], code)
        table[where] = code
        again |= table[where] != code
        if again.any():
            several = where[again]
            table[several] = table[several] & ~_LANE | SEVERAL
        self.read_clock[row][where] = clock

    def note_write(self, where, agent: int, clock: int, code) -> None:
        """Record a write."""
        self.last_write[agent] = max(self.last_write.get(agent, 0), clock)
        self.writer[where] = agent
        self.write_clock[where] = clock
        self.write_at[where] = code
        if self.weak_write is not None:
            self.weak_write[where] = 0
        if self.copied is not None:
            self.copied[where] = False

    def forget(self, where) -> None:
        """The cells hold nothing any more."""
        self.writer[where] = UNTOUCHED
        self.write_clock[where] = 0

    def first_unwritten(self, where) -> int | None:
        """Index of the first cell that was never written."""
        missing = self.writer[where] == UNTOUCHED
        return int(missing.argmax()) if missing.any() else None


def other_lanes(codes: np.ndarray, lanes) -> np.ndarray:
    """Which places are not of the given lanes: places or lanes, one for each; SEVERAL is none's
    own."""
    mine = codes & _LANE
    return (mine != (lanes & _LANE)) | (mine == SEVERAL)
