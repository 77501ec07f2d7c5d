"""Vector clocks of the agents of one cluster: warps and the asynchronous engines they start."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

EVER = np.iinfo(np.int32).max


class Clocks:
    """Clocks by warp, and the clocks published at synchronisation objects.

    `seen[w]` is the vector clock of warp agent w; `fenced[w]` the part of it whose ordinary writes
    are visible to the asynchronous proxy; `published` maps a synchronisation object to the clocks
    released there.
    """

    def __init__(self, warps: int, capacity: int):
        self.capacity = capacity
        self.seen = np.zeros((warps, capacity), np.int32)
        self.fenced = np.zeros((warps, capacity), np.int32)
        # What the warp had seen at its last memory fence: released by relaxed arrivals.
        self.at_fence = np.zeros((warps, capacity), np.int32)
        for w in range(warps):
            self.seen[w, w] = 1
        self.agents: dict[Hashable, int] = {("warp", w): w for w in range(warps)}
        self.names: list[Hashable] = list(self.agents)
        self.published: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}

    def agent(self, key: Hashable) -> int:
        """The number of an agent, assigned at first use."""
        found = self.agents.get(key)
        if found is None:
            found = self.agents[key] = len(self.names)
            self.names.append(key)
            if found >= self.capacity:
                raise MemoryError(f"more than {self.capacity} agents in one cluster")
        return found

    def release(self, warp: int, key: Hashable, *, relaxed: bool = False) -> None:
        """Publish what a warp knows; later accesses of the warp are not covered."""
        source = self.at_fence[warp] if relaxed else self.seen[warp]
        self.publish(key, source, self.fenced[warp])
        self.seen[warp, warp] += 1

    def publish(self, key: Hashable, seen: np.ndarray, fenced: np.ndarray) -> None:
        """Join clocks into a synchronisation object."""
        held = self.published.get(key)
        if held is None:
            self.published[key] = (seen.copy(), fenced.copy())
        else:
            np.maximum(held[0], seen, out=held[0])
            np.maximum(held[1], fenced, out=held[1])

    def acquire(self, warp: int, key: Hashable) -> None:
        """Learn what was published at a synchronisation object."""
        held = self.published.get(key)
        if held is not None:
            np.maximum(self.seen[warp], held[0], out=self.seen[warp])
            np.maximum(self.fenced[warp], held[1], out=self.fenced[warp])

    def fence(self, warp: int) -> None:
        """A memory fence: relaxed releases now carry all the warp has seen."""
        self.at_fence[warp] = self.seen[warp]

    def proxy_fence(self, warp: int) -> None:
        """fence.proxy.async: ordinary writes the warp knows of become visible to async engines."""
        np.maximum(self.fenced[warp], self.seen[warp], out=self.fenced[warp])

    def learn(self, warp: int, agent: int, clock: int) -> None:
        """An engine's work up to `clock` is complete for this warp."""
        self.seen[warp, agent] = max(self.seen[warp, agent], clock)
