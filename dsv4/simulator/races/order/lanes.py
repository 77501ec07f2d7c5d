"""Order between the lanes of one warp.

Lanes of a warp run in step here, and mostly so on hardware, but nothing promises it: memory
accesses of different lanes are ordered by bar.warp.sync, by barriers that all lanes take part in,
or through other synchronisation. So are copies by cp.async, of which a wait tells each lane its
own. Collectives (shuffles, votes, elect, everything `.aligned`) bring the lanes together without
ordering memory. Compiled code relies on that, and hardware issues a warp's accesses in order, so
conflicts that a collective lies between are only warned of.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.races.cells.shadow import LANE_CODES, SEVERAL, Shadow
from dsv4.simulator.races.order.clocks import EVER, Clocks

_MERGE = 64


class LaneOrder:
    """Order of one warp's own accesses among its lanes, in its own clock.

    Accesses at `synced` or later are not ordered between lanes; those before `converged` have at
    least a collective behind them. `recent` holds what lanes accessed since: the memory (a Shadow,
    or a History of global memory), the warp's number there, and the cells.

    Copies have clocks of their own: lanes have waited for theirs up to `copies_waited`, a
    collective lies behind those up to `copies_converged`, and all lanes know of `copies_synced`.
    `copies` holds those that no mbarrier tells of: the memory, the cells and the clock. When some
    lanes release, those of them that others have waited for become writes of these.
    """

    __slots__ = (
        "agent", "clocks", "collectives", "converged", "copies", "copies_converged",
        "copies_synced", "copies_waited", "copy_waits", "gathered", "recent", "released", "synced",
    )  # fmt: skip

    def __init__(self, agent: int, clocks: Clocks):
        self.agent, self.clocks = agent, clocks
        self.copies_waited = self.copies_converged = self.copies_synced = 0
        self.copy_waits: list[tuple[int, int]] = []  # the warp's clock, and that of the copies
        self.copies: list[tuple[Shadow, np.ndarray, int]] = []
        self.synced = self.converged = 1
        self.collectives = 0
        self.recent: list[tuple[object, int, np.ndarray]] = []
        self.gathered: list[tuple[object, int, np.ndarray]] = []  # of before the last collective
        self.released = np.zeros(LANE_CODES, np.int64)  # by lane: its last release or fence

    @property
    def unsettled(self) -> bool:
        """Some accesses of the warp are not ordered between its lanes."""
        return bool(self.recent) or self.synced < self.converged

    @property
    def has_own_copies(self) -> bool:
        """Lanes have waited for copies of which others do not know."""
        return self.copies_synced < self.copies_waited

    def catch_up(self, collectives: int) -> None:
        """The warp has executed this many collectives."""
        if collectives == self.collectives:
            return
        self.collectives = collectives
        has_waited = self.copies_converged < self.copies_waited
        self.copies_converged = self.copies_waited
        self.clocks.converge(self.agent)
        if self.recent or has_waited:
            self.gathered = _merged(self.gathered + self.recent)
            self.recent = []
            self.converged = self.clocks.advance(self.agent)

    def sync(self) -> None:
        """All lanes are together and see each other's accesses."""
        self.clocks.converge(self.agent)
        self.recent, self.gathered = [], []
        self.copies_synced, self.copy_waits = self.copies_waited, []
        if self.copies:
            self.copies = [copy for copy in self.copies if copy[2] > self.copies_waited]
        self.synced = self.converged = self.clocks.advance(self.agent)

    def covered(self, clock: int) -> None:
        """All lanes have acquired what the warp released at a clock."""
        if clock >= self.synced:
            self.synced = clock + 1
            self.converged = max(self.converged, self.synced)
        while self.copy_waits and self.copy_waits[0][0] <= clock:
            self.copies_synced = max(self.copies_synced, self.copy_waits.pop(0)[1])

    def wait_for_copies(self, clock: int, known: int) -> None:
        """Each lane has waited for its copies up to a clock; of those up to `known` the warp knew
        before, by an earlier wait or from a barrier, which is for all lanes."""
        if known > self.copies_waited:
            self.copies_synced = known
        if clock > self.copies_waited:
            self.copies_waited = clock
            self.copy_waits.append((int(self.clocks.seen[self.agent, self.agent]), clock))

    def _own_copies(self) -> None:
        """Copies that lanes have waited for count as written by them when they had."""
        copier, left = self.clocks.agent(("cp.async", self.agent)), []
        for memory, cells, number in self.copies:
            if number > self.copies_waited:
                left.append((memory, cells, number))
            elif number > self.copies_synced:
                waited = next(clock for clock, last in self.copy_waits if last >= number)
                cells = memory.hand_over(cells, copier, number, self.agent, waited)
                since = self.gathered if number <= self.copies_converged else self.recent
                since.append((memory, self.agent, cells))
        self.copies = left

    def note(self, memory, owner: int, cells: np.ndarray) -> None:
        """Lanes accessed cells."""
        self.recent.append((memory, owner, cells))
        self.recent = _merged(self.recent)

    def covers(self, lanes: np.ndarray | None) -> None:
        """Some lanes (None: all) are about to release what they did so far."""
        clock = int(self.clocks.seen[self.agent, self.agent])
        if lanes is None:
            self.released[:] = clock
        else:
            self.released[:32][lanes] = clock
            self.released[SEVERAL] = self.released[:32].min()

    def leave_behind(self, lanes: np.ndarray | None) -> None:
        """Some lanes released something: what the others did and have not released themselves is
        not covered, as if it came later."""
        if lanes is None:
            return
        if self.copies and self.has_own_copies:
            self._own_copies()
        if not (self.recent or self.gathered):
            return
        since = np.maximum(self.released + 1, self.synced)
        since[:32][lanes] = EVER
        clock = int(self.clocks.seen[self.agent, self.agent])
        for memory, owner, cells in self.gathered:
            memory.postpone_weakly(cells, owner, since, clock)
        since = np.maximum(since, self.converged)
        for memory, owner, cells in self.recent:
            memory.postpone(cells, owner, since, clock)
        self.clocks.keep_fenced(self.agent, self.synced)


def _merged(accesses: list[tuple[object, int, np.ndarray]]) -> list:
    """The same accesses, in few entries."""
    if len(accesses) <= _MERGE:
        return accesses
    parts: dict[tuple, list[np.ndarray]] = {}
    for memory, owner, cells in accesses:
        parts.setdefault((memory, owner), []).append(cells)
    return [(*key, np.unique(np.concatenate(cells))) for key, cells in parts.items()]
