"""Happens-before over global memory, within and between clusters.

Between clusters, order comes from release and acquire on flags and counters. A cluster counts its
releases; a write carries the count at which it happened, and another cluster that acquired a later
release is ordered after it. Strong accesses (atomics, acquire, release, relaxed, volatile)
synchronise and are not themselves reported. Bulk and tensor copies' global side is not tracked.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dsv4.simulator.memory import SHARED_WINDOW, Region

_STRONG = frozenset(("acquire", "release", "acq_rel", "relaxed", "volatile", "mmio"))
NOBODY = -1


class _History:
    """Last write and last read of each 4-byte granule of one allocation."""

    def __init__(self, granules: int):
        self.tables = {
            kind: {
                "cluster": np.full(granules, NOBODY, np.int32),
                "agent": np.zeros(granules, np.int32),
                "clock": np.zeros(granules, np.int32),
                "releases": np.zeros(granules, np.int32),
                "at": np.zeros(granules, np.int32),
            }
            for kind in ("write", "read")
        }


class GlobalRaces:
    """Checks one launch's accesses to global memory; reports through the monitor."""

    def __init__(self, monitor):
        self.monitor = monitor
        self.histories: dict[int, _History] = {}
        self.releases: dict[int, int] = defaultdict(int)
        # Flag address -> ({cluster: release count}, {cluster: (seen, fenced)}).
        self.published: dict[int, tuple[dict, dict]] = {}
        self.pending: dict[tuple[int, int], list[int]] = defaultdict(list)

    # --- data ------------------------------------------------------------------------------------
    def access(self, w, active: np.ndarray, size: int, write: bool) -> None:
        """An ordinary or strong load or store."""
        parts = self.monitor.entry.instructions[w.at].parts
        strong = _STRONG.intersection(parts)
        if strong:
            self._strong(w, active, strong, write)
            return
        memory = w.cluster.memory
        region = memory.find(int(active[0]), int(active[0]) + size)
        offsets = (active.astype(np.int64) - region.start) >> 2
        offsets = offsets[(offsets >= 0) & (offsets < (region.stop - region.start + 3) // 4)]
        if size > 4:
            offsets = (offsets[:, None] + np.arange(size // 4)).reshape(-1)
        tables = self._history(region).tables
        self._check(w, region, tables["write"], offsets, "write" if write else "read", "write")
        if write:
            self._check(w, region, tables["read"], offsets, "write", "read")
        table = tables["write" if write else "read"]
        state = w.cluster.state
        table["cluster"][offsets] = w.cluster.number
        table["agent"][offsets] = w.agent
        table["clock"][offsets] = state.clocks.seen[w.agent, w.agent]
        table["releases"][offsets] = self.releases[w.cluster.number] + 1
        table["at"][offsets] = w.at

    def _history(self, region: Region) -> _History:
        found = self.histories.get(region.start)
        if found is None:
            found = _History((region.stop - region.start + 3) // 4)
            self.histories[region.start] = found
        return found

    def _check(self, w, region: Region, table, offsets, now: str, before: str) -> None:
        state, mine = w.cluster.state, w.cluster.number
        seen = state.clocks.seen[w.agent]
        clusters = table["cluster"][offsets]
        late = (clusters == mine) & (table["clock"][offsets] > seen[table["agent"][offsets]])
        others = (clusters != mine) & (clusters != NOBODY)
        for other in np.unique(clusters[others]).tolist() if others.any() else ():
            agent = state.clocks.agents.get(("cluster", other))
            known = 0 if agent is None else int(seen[agent])
            late |= (clusters == other) & (table["releases"][offsets] > known)
        if before == "read" and now == "write":
            # A warp's own reads never conflict with its writes.
            late &= ~((clusters == mine) & (table["agent"][offsets] == w.agent))
        if late.any():
            i = int(late.argmax())
            offset = int(offsets[i]) * 4
            self.monitor.global_race(
                w, f"{now} of {region.name} at byte {offset}", before, int(table["at"][offsets][i])
            )

    # --- synchronisation -------------------------------------------------------------------------
    def _strong(self, w, active: np.ndarray, strong: frozenset, write: bool) -> None:
        for address in np.unique(active).tolist():
            if write:
                self._release(w, address, bool(strong & {"release", "acq_rel"}))
            elif strong & {"acquire", "acq_rel", "volatile"}:
                self._acquire(w, address)
            else:
                self.pending[w.cluster.number, w.agent].append(address)

    def atomic(self, w, space: str, addresses: np.ndarray) -> None:
        """atom and red: release and acquire by their qualifiers, or by fences around them."""
        parts = self.monitor.entry.instructions[w.at].parts
        if space.startswith("shared"):
            return
        release = bool({"release", "acq_rel"} & set(parts))
        acquire = bool({"acquire", "acq_rel"} & set(parts))
        for address in np.unique(addresses).tolist():
            if address >= SHARED_WINDOW:
                continue
            if acquire:
                self._acquire(w, address)
            else:
                self.pending[w.cluster.number, w.agent].append(address)
            self._release(w, address, release)

    def fence(self, w) -> None:
        """A memory fence: relaxed loads before it now acquire."""
        for address in self.pending.pop((w.cluster.number, w.agent), ()):
            self._acquire(w, address)

    def _release(self, w, address: int, full: bool) -> None:
        """Publish at a flag what the warp has seen, or had seen at its last fence (relaxed)."""
        clocks, mine = w.cluster.state.clocks, w.cluster.number
        source = clocks.seen[w.agent] if full else clocks.at_fence[w.agent]
        if not source.any():
            return
        counts, held = self.published.setdefault(address, ({}, {}))
        for key, agent in clocks.agents.items():
            if key[0] == "cluster" and source[agent]:
                counts[key[1]] = max(counts.get(key[1], 0), int(source[agent]))
        self.releases[mine] += 1
        counts[mine] = self.releases[mine]
        seen, fenced = held.get(mine, (source, clocks.fenced[w.agent]))
        held[mine] = (
            np.maximum(seen, source),
            np.maximum(fenced, clocks.fenced[w.agent]),
        )
        clocks.seen[w.agent, w.agent] += 1

    def _acquire(self, w, address: int) -> None:
        found = self.published.get(address)
        if found is None:
            return
        counts, held = found
        clocks, mine = w.cluster.state.clocks, w.cluster.number
        for cluster, count in counts.items():
            if cluster != mine:
                clocks.learn(w.agent, clocks.agent(("cluster", cluster)), count)
        if mine in held:
            np.maximum(clocks.seen[w.agent], held[mine][0], out=clocks.seen[w.agent])
            np.maximum(clocks.fenced[w.agent], held[mine][1], out=clocks.fenced[w.agent])
