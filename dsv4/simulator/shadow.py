"""Shadow memory: who last wrote and who read each granule, with logical clocks.

A granule is 4 bytes of shared or global memory, or 16 lanes of one TMEM column. An access is
ordered after an earlier one by agent `a` at clock `c` if the accessor's vector clock has at least
`c` at `a`.
"""

from __future__ import annotations

import numpy as np

NOBODY = -1


class Shadow:
    """Access history of one memory.

    Args:
        granules: size of the memory in granules.
        agents: capacity of vector clocks.
    """

    def __init__(self, granules: int, agents: int):
        self.writer = np.full(granules, NOBODY, np.int16)
        self.write_clock = np.zeros(granules, np.int32)
        self.write_at = np.zeros(granules, np.int32)
        self.partial = np.zeros(granules, np.bool_)  # the last write covered part of the granule
        self.row_of = np.full(agents, -1, np.int32)  # agent -> row of the read tables
        self.readers: list[int] = []
        self.read_clock = np.zeros((4, granules), np.int32)
        self.read_at = np.zeros((4, granules), np.int32)

    def unordered_write(self, where, clock: np.ndarray, part: bool = False):
        """(agent, location, granule) of a last write that `clock` does not cover, or None."""
        writer = self.writer[where]
        late = self.write_clock[where] > clock[writer]
        if part:
            late = late & ~self.partial[where]
        if not late.any():
            return None
        i = int(late.argmax())
        return int(writer[i]), int(self.write_at[where][i]), i

    def unordered_read(self, where, clock: np.ndarray, myself: int):
        """(agent, location, granule) of a read that `clock` does not cover, or None."""
        if not self.readers:
            return None
        known = clock[self.readers]
        row = self.row_of[myself]
        late = self.read_clock[: len(self.readers), where] > known[:, None]
        if row >= 0:
            late[row] = False
        if not late.any():
            return None
        row, i = np.unravel_index(int(late.argmax()), late.shape)
        return self.readers[row], int(self.read_at[row, where][i]), int(i)

    def note_read(self, where, agent: int, clock: int, at: int) -> None:
        """Record a read."""
        row = self.row_of[agent]
        if row < 0:
            row = self.row_of[agent] = len(self.readers)
            self.readers.append(agent)
            if row >= len(self.read_clock):
                self.read_clock = np.concatenate([self.read_clock, np.zeros_like(self.read_clock)])
                self.read_at = np.concatenate([self.read_at, np.zeros_like(self.read_at)])
        self.read_clock[row, where] = clock
        self.read_at[row, where] = at

    def note_write(self, where, agent: int, clock: int, at: int, part: bool = False) -> None:
        """Record a write."""
        self.writer[where] = agent
        self.write_clock[where] = clock
        self.write_at[where] = at
        self.partial[where] = part

    def forget(self, where) -> None:
        """The granules hold nothing any more."""
        self.writer[where] = NOBODY
        self.write_clock[where] = 0

    def first_unwritten(self, where) -> int | None:
        """Index of the first granule nobody ever wrote."""
        missing = self.writer[where] == NOBODY
        return int(missing.argmax()) if missing.any() else None
