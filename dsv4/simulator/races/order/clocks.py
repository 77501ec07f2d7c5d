"""Vector clocks of the agents of one cluster: warps and the asynchronous engines they start."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from dsv4.simulator.ptx.qualifiers import Order, Scope
from dsv4.simulator.races.order.fences import Fence, Fences, both, without

EVER = np.iinfo(np.int32).max
# Rows of what a warp knows, and of what is published at a synchronisation object:
# SEEN           accesses that happened before;
# FENCED_SHARED  those of them whose ordinary writes to shared memory the asynchronous proxy sees;
# FENCED_GLOBAL  the same of global memory;
# ORDERED        those that a tcgen05.fence::before_thread_sync or a commit put in order;
# INITIALISED    initialisations of mbarriers that a fence.mbarrier_init made visible.
SEEN, FENCED_SHARED, FENCED_GLOBAL, ORDERED, INITIALISED = range(5)
_ROWS = 5
_FENCED = slice(FENCED_SHARED, FENCED_GLOBAL + 1)


class Clocks:
    """Clocks by warp, and the clocks published at synchronisation objects.

    `know[w]` is [row, agent] of warp agent w. Some lanes may be ahead of the others, when they
    alone waited for something: `know` is then theirs and `of_the_others` what the rest knows, until
    the warp converges. Lane 0 waits for a copy, and may read what it brought; lane 1 may not before
    a bar.warp.sync.
    """

    def __init__(self, warps: int):
        self.warps = warps
        # Writes that the asynchronous proxy needs a fence to see are those of the first agents: of
        # warps, and of their copies by cp.async.
        self.ordinary = 2 * warps
        self.agents: dict[Hashable, int] = {("warp", w): w for w in range(warps)}
        self.agents |= {("cp.async", w): warps + w for w in range(warps)}
        self.names: list[Hashable] = list(self.agents)
        self.published: dict[Hashable, np.ndarray] = {}
        self.lanes_ahead: dict[int, np.ndarray] = {}  # warp -> those that know more
        self.of_the_others: dict[int, np.ndarray] = {}
        # `restricted` is what the warp fenced for mbarriers alone.
        self.fences = Fences(warps, _ROWS)
        self.restricted = np.zeros((warps, _ROWS, 0), np.int32)
        # What relaxed waits of lanes saw, and how far away it was published: for their next fence.
        self.pending: dict[int, list[tuple[Scope, np.ndarray, np.ndarray | None]]] = {}
        # tcgen05 work that a tcgen05.fence::after_thread_sync of the warp put in order.
        self.settled = np.zeros((warps, 0), np.int32)
        self.know = np.zeros((warps, _ROWS, 0), np.int32)
        self._widen(8 * warps + 32)
        for w in range(warps):
            self.seen[w, w] = 1

    def _widen(self, capacity: int) -> None:
        self.know, self.fences.shared, self.restricted, self.settled = (
            _wide(x, capacity)
            for x in (self.know, self.fences.shared, self.restricted, self.settled)
        )
        self.of_the_others = {w: _wide(x, capacity) for w, x in self.of_the_others.items()}
        self.seen = self.know[:, SEEN]

    def agent(self, key: Hashable) -> int:
        """The number of an agent, assigned at first use."""
        found = self.agents.get(key)
        if found is None:
            found = self.agents[key] = len(self.names)
            self.names.append(key)
            if found >= self.know.shape[-1]:
                self._widen(2 * found)
        return found

    # --- what lanes know -------------------------------------------------------------------------
    def view(self, warp: int, lanes: np.ndarray | None) -> np.ndarray:
        """[row, agent] that all of `lanes` (None: the warp) know. Not to be kept."""
        others = self.of_the_others.get(warp)
        if others is None or self._are_ahead(warp, lanes):
            return self.know[warp]
        others[SEEN, warp] = self.seen[warp, warp]
        return others

    def differ(self, warp: int) -> bool:
        """Whether some lanes know more than others."""
        return warp in self.of_the_others

    def _are_ahead(self, warp: int, lanes: np.ndarray | None) -> bool:
        return lanes is not None and not (lanes & ~self.lanes_ahead[warp]).any()

    def _targets(self, warp: int, lanes: np.ndarray | None) -> list[np.ndarray]:
        """What changes when `lanes` learn something. Lanes that differ from those already informed
        are given the benefit of the doubt: what they learn, all know."""
        if warp not in self.of_the_others:
            if lanes is None:
                return [self.know[warp]]
            self.of_the_others[warp], self.lanes_ahead[warp] = self.know[warp].copy(), lanes
        if self._are_ahead(warp, lanes):
            return [self.know[warp]]
        return [self.know[warp], self.of_the_others[warp]]

    def converge(self, warp: int) -> None:
        """All lanes know what some of them knew."""
        if self.of_the_others.pop(warp, None) is not None:
            del self.lanes_ahead[warp]

    # --- synchronisation objects -----------------------------------------------------------------
    def advance(self, warp: int) -> int:
        """Start a new interval of the warp's own accesses; its number."""
        self.seen[warp, warp] += 1
        return int(self.seen[warp, warp])

    def release(self, warp: int, key: Hashable, lanes: np.ndarray | None = None) -> None:
        """Publish what lanes know; later accesses of the warp are not covered."""
        self.publish(key, self.view(warp, lanes))
        self.advance(warp)

    def told(
        self, warp: int, lanes: np.ndarray | None, order: Order, distance: Scope
    ) -> np.ndarray | None:
        """What an arrival at an mbarrier or cluster barrier tells threads at a distance: None if
        its scope does not reach them, what was fenced for them if it is relaxed."""
        if distance > order.scope:
            return None
        if order.releases:
            return self.view(warp, lanes)
        return np.maximum(self.fences.told(warp, lanes)[distance], self.restricted[warp])

    def publish(self, key: Hashable, know: np.ndarray) -> None:
        """Join clocks into a synchronisation object."""
        held = self.published.get(key)
        self.published[key] = know.copy() if held is None else joined(held, know)

    def acquire(self, warp: int, key: Hashable, lanes: np.ndarray | None = None) -> int:
        """Learn what was published at a synchronisation object; the warp's own clock there."""
        held = self.published.get(key)
        if held is None:
            return 0
        self.join(warp, held, lanes)
        return int(held[SEEN, warp])

    def join(self, warp: int, held: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Learn published clocks."""
        for know in self._targets(warp, lanes):
            part = know[:, : held.shape[1]]
            np.maximum(part, held, out=part)

    def learn(self, warp: int, agent: int, clock: int, lanes: np.ndarray | None = None) -> None:
        """An engine's work up to `clock` is complete for these lanes."""
        for know in self._targets(warp, lanes):
            know[SEEN, agent] = max(know[SEEN, agent], clock)

    # --- fences ----------------------------------------------------------------------------------
    def observe(self, warp: int, key: Hashable, distance: Scope, lanes: np.ndarray | None) -> None:
        """A relaxed wait for something published at a distance: the next fence of the lanes
        acquires it."""
        held = self.published.get(key)
        if held is not None:
            self.pending.setdefault(warp, []).append((distance, held.copy(), lanes))

    def fence(self, warp: int, order: Order, lanes: np.ndarray | None) -> None:
        """A fence between threads within a scope, by some lanes."""
        if order.acquires:
            kept = []
            for distance, held, waited in self.pending.pop(warp, ()):
                learning, left = both(waited, lanes), waited
                if distance <= order.scope and (learning is None or learning.any()):
                    self.join(warp, held, learning)
                    left = without(waited, lanes)
                if left is None or left.any():
                    kept.append((distance, held, left))
            if kept:
                self.pending[warp] = kept
        if order.releases and order.restricted:
            self.restricted[warp] = self.know[warp]
        elif order.releases:
            self._keep_fence(warp, order.scope, lanes)

    def _keep_fence(self, warp: int, scope: Scope, lanes: np.ndarray | None) -> None:
        know = self.view(warp, lanes)
        fence = None if lanes is None else Fence(lanes, scope, know.copy())
        self.fences.keep(warp, fence, scope, know)
        if warp not in self.of_the_others or self._are_ahead(warp, lanes):
            return
        ahead = both(self.lanes_ahead[warp], lanes)
        if ahead.any():
            self.fences.keep(warp, Fence(ahead, scope, self.know[warp].copy()), scope, know)

    def init_fence(self, warp: int) -> None:
        """fence.mbarrier_init: relaxed arrivals now tell of the mbarriers the warp initialised."""
        clock = self.seen[warp, warp]
        self.know[warp, INITIALISED, warp] = clock
        self.fences.shared[warp, : Scope.CLUSTER + 1, INITIALISED, warp] = clock

    def proxy_fence(self, warp: int, lanes: np.ndarray | None, row: int | None) -> None:
        """fence.proxy.async: ordinary writes the lanes know of become visible to async engines;
        `row` is that of one state space, None of both."""
        views = [self.view(warp, lanes)]
        if warp in self.of_the_others and lanes is None:
            views.append(self.know[warp])
        for know in views:
            fenced = know[_FENCED if row is None else slice(row, row + 1)]
            np.maximum(fenced, know[SEEN], out=fenced)

    def keep_fenced(self, warp: int, since: int) -> None:
        """What the warp fenced since a clock stays fenced though it now counts as later."""
        know = self.know[warp]
        for row in (FENCED_SHARED, FENCED_GLOBAL):
            if know[row, warp] >= since:
                know[row, warp] = know[SEEN, warp]

    def before_thread_sync(self, warp: int) -> None:
        """tcgen05.fence::before_thread_sync: releases that follow carry the warp's tcgen05 work."""
        know = self.know[warp]
        np.maximum(know[ORDERED], know[SEEN], out=know[ORDERED])

    def after_thread_sync(self, warp: int) -> None:
        """tcgen05.fence::after_thread_sync: tcgen05 work that follows comes after what is known."""
        np.maximum(self.settled[warp], self.know[warp, ORDERED], out=self.settled[warp])


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise maximum of clocks of different widths; `a` is reused if it is wide enough."""
    if a.shape[-1] < b.shape[-1]:
        a = _wide(a, b.shape[-1])
    part = a[..., : b.shape[-1]]
    np.maximum(part, b, out=part)
    return a


def _wide(x: np.ndarray, capacity: int) -> np.ndarray:
    out = np.zeros((*x.shape[:-1], capacity), np.int32)
    out[..., : x.shape[-1]] = x
    return out
