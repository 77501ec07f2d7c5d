"""Order that flags and counters in memory carry: release, acquire, and fences around them.

A release reaches a reader if the scope of either operation (and of the fences that make a relaxed
one a release or an acquire) includes the other thread, and if the reader sees the value written, or
one that atomics alone made of it.

Within a cluster a flag hands over clocks. Between clusters, whose clocks have nothing in common,
every release is numbered by the warp that made it and its clocks are kept: another cluster knows
the number of the last release it has acquired from each warp, as the clock of an agent
("cluster", number, warp, full).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from dsv4.simulator.ptx.qualifiers import Order, Scope
from dsv4.simulator.races.order.clocks import FENCED_GLOBAL, SEEN
from dsv4.simulator.races.order.fences import both, without


class Source(NamedTuple):
    """A warp that released: by releases proper (`full`), or by relaxed operations after a fence."""

    cluster: int
    warp: int
    full: bool


class _Release(NamedTuple):
    """Knowledge that a release hands to an acquire."""

    know: np.ndarray  # [row, agent] of the releasing cluster; after a fence, by distance
    # The releases of other clusters it tells of, readers on the same GPU and on others.
    foreign: dict[Scope, dict[Source, int]]


class _Entry(NamedTuple):
    """A release that a flag's value carries."""

    count: int  # its number, among those of its source
    scope: Scope
    cta: tuple[int, int]  # cluster and rank of the source


class _Seen(NamedTuple):
    """A release that a relaxed read saw."""

    source: Source
    count: int
    distance: Scope
    lanes: np.ndarray | None  # that read


class Flags:
    """Releases of one launch, by their place."""

    def __init__(self) -> None:
        self.clusters_per_gpu = 1 << 30
        self.releases: dict[Source, list[_Release]] = defaultdict(list)
        self.published: dict[tuple, dict[Source, _Entry]] = {}
        # Flag -> CTA and scope of the last write.
        self.writers: dict[tuple, tuple[tuple[int, int], Scope]] = {}
        # Warp -> releases that relaxed reads of lanes saw: for their next fence.
        self.pending: dict[tuple[int, int], dict[tuple, _Seen]] = defaultdict(dict)

    # --- writes ----------------------------------------------------------------------------------
    def write(self, w, flag: tuple, order: Order, atomic: bool, lanes: np.ndarray | None) -> None:
        """A store to a flag or an atomic on it, with what it releases."""
        mine = (w.cluster.number, w.cta.rank)
        held = self.published.get(flag)
        if held:
            # A store ends what others released; an atomic hands on what it can see.
            self.published[flag] = {
                source: entry
                for source, entry in held.items()
                if source[:2] == (w.cluster.number, w.agent)
                or (atomic and self._distance(mine, entry.cta) <= min(entry.scope, order.scope))
            }
        self.writers[flag] = mine, order.scope
        source = self._release(w, order.releases, lanes)
        if source is None:
            return
        entry = _Entry(len(self.releases[source]), order.scope, mine)
        self.published.setdefault(flag, {})[source] = entry
        w.order.covers(lanes)
        w.cluster.state.clocks.advance(w.agent)
        w.order.leave_behind(lanes)

    def _release(self, w, full: bool, lanes: np.ndarray | None) -> Source | None:
        """Keep what the lanes know, or what the warp knew at its fences, if anything."""
        clocks = w.cluster.state.clocks
        know = clocks.view(w.agent, lanes) if full else clocks.fences.told(w.agent, lanes)
        if not know.any():
            return None
        foreign = {}
        for scope in (Scope.GPU, Scope.SYS):
            far = know[SEEN] if full else know[scope, SEEN]
            foreign[scope] = {
                Source(*key[1:]): int(far[agent])
                for key, agent in clocks.agents.items()
                if key[0] == "cluster" and far[agent]
            }
        source = Source(w.cluster.number, w.agent, full)
        self.releases[source].append(_Release(know.copy(), foreign))
        return source

    # --- reads -----------------------------------------------------------------------------------
    def read(self, w, flag: tuple, order: Order, lanes: np.ndarray | None) -> None:
        """A strong read of a flag: acquires now, or (relaxed) with the next fence."""
        seen = self._visible(w, flag, order.scope)
        if order.acquires:
            for source, (count, distance) in seen.items():
                self._learn(w, source, count, distance, lanes)
        for source, (count, distance) in () if order.acquires else seen.items():
            key = source, None if lanes is None else lanes.tobytes()
            self.pending[w.cluster.number, w.agent][key] = _Seen(source, count, distance, lanes)

    def _visible(self, w, flag: tuple, scope: Scope) -> dict[Source, tuple[int, Scope]]:
        """The releases that a read of this scope sees, and how far away they were made."""
        held = self.published.get(flag)
        if not held:
            return {}
        mine = (w.cluster.number, w.cta.rank)
        cta, written = self.writers[flag]
        if self._distance(mine, cta) > min(scope, written):
            return {}
        found = {}
        for source, entry in held.items():
            distance = self._distance(mine, entry.cta)
            if distance <= min(scope, entry.scope):
                found[source] = entry.count, distance
        return found

    def _learn(self, w, source: Source, count: int, distance: Scope, lanes) -> None:
        release = self.releases[source][count - 1]
        clocks = w.cluster.state.clocks
        if source.cluster == w.cluster.number:
            clocks.join(w.agent, release.know if source.full else release.know[distance], lanes)
        else:
            clocks.learn(w.agent, clocks.agent(("cluster", *source)), count, lanes)
        for other, known in release.foreign[max(distance, Scope.GPU)].items():
            if other.cluster != w.cluster.number:
                clocks.learn(w.agent, clocks.agent(("cluster", *other)), known, lanes)
            else:
                clocks.join(w.agent, self._far(other, known, w.cluster.number), lanes)

    def fence(self, w, order: Order, lanes: np.ndarray | None) -> None:
        """A fence between threads: relaxed reads of its lanes before it now acquire."""
        key = (w.cluster.number, w.agent)
        if not order.acquires or order.restricted or key not in self.pending:
            return
        for name, seen in list(self.pending[key].items()):
            learning = both(seen.lanes, lanes)
            if seen.distance > order.scope or not (learning is None or learning.any()):
                continue
            self._learn(w, seen.source, seen.count, seen.distance, learning)
            del self.pending[key][name]
            left = without(seen.lanes, lanes)
            if left.any():
                self.pending[key][seen.source, left.tobytes()] = seen._replace(lanes=left)

    # --- other clusters --------------------------------------------------------------------------
    def _far(self, source: Source, count: int, cluster: int) -> np.ndarray:
        """[row, agent] that a release tells another cluster."""
        know = self.releases[source][count - 1].know
        if source.full:
            return know
        return know[max(Scope.GPU, self._distance((source.cluster, 0), (cluster, 0)))]

    def known(self, w, know: np.ndarray, cluster: int) -> dict[int, np.ndarray]:
        """Clocks of another cluster's agents, by row: those seen, and those fenced as well."""
        seen = fenced = np.zeros(0, np.int32)
        for key, agent in w.cluster.state.clocks.agents.items():
            if key[:2] != ("cluster", cluster) or not know[SEEN, agent]:
                continue
            source = Source(*key[1:])
            release = self._far(source, int(know[SEEN, agent]), w.cluster.number)
            seen, fenced = _larger(seen, release[SEEN]), _larger(fenced, release[FENCED_GLOBAL])
            if know[FENCED_GLOBAL, agent]:
                # A proxy fence after the acquire covers all that was acquired.
                count = int(know[FENCED_GLOBAL, agent])
                fenced = _larger(fenced, self._far(source, count, w.cluster.number)[SEEN])
        return {SEEN: seen, FENCED_GLOBAL: fenced}

    def _distance(self, a: tuple[int, int], b: tuple[int, int]) -> Scope:
        """How far two CTAs, given as cluster and rank, are apart."""
        if a == b:
            return Scope.CTA
        if a[0] == b[0]:
            return Scope.CLUSTER
        here, there = (cluster // self.clusters_per_gpu for cluster, _ in (a, b))
        return Scope.GPU if here == there else Scope.SYS


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = max(len(a), len(b))
    return np.maximum(np.pad(a, (0, width - len(a))), np.pad(b, (0, width - len(b))))
