"""Order that flags and counters in memory carry: release, acquire, and fences around them.

Within a cluster a flag hands over clocks. Between clusters, whose clocks have nothing in common,
every release is numbered by the warp that made it and its clocks are kept: another cluster knows
the number of the last release it has acquired from each warp, as the clock of an agent
("cluster", number, warp).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from dsv4.simulator.clocks import FENCED, SEEN

Source = tuple[int, int]  # cluster and warp that released


class _Release(NamedTuple):
    know: np.ndarray  # [row, agent] of the releasing cluster
    foreign: dict[Source, int]  # the releases of other clusters it knows of


class Flags:
    """What was released where, in one launch."""

    def __init__(self) -> None:
        self.releases: dict[Source, list[_Release]] = defaultdict(list)
        self.published: dict[tuple, dict[Source, int]] = {}  # flag -> source -> number of releases
        self.pending: dict[Source, list[tuple]] = defaultdict(list)

    def release(self, w, flag: tuple, full: bool, lanes: np.ndarray | None) -> None:
        """Publish what the lanes know, or (relaxed) what the warp knew at its last fence."""
        clocks, source = w.cluster.state.clocks, (w.cluster.number, w.agent)
        know = clocks.view(w.agent, lanes) if full else clocks.at_fence[w.agent]
        if not know.any():
            return
        foreign = {
            key[1:]: int(know[SEEN, agent])
            for key, agent in clocks.agents.items()
            if key[0] == "cluster" and know[SEEN, agent]
        }
        self.releases[source].append(_Release(know.copy(), foreign))
        self.published.setdefault(flag, {})[source] = len(self.releases[source])
        w.order.covers(lanes)
        clocks.advance(w.agent)
        w.order.leave_behind(lanes)

    def acquire(self, w, flag: tuple, lanes: np.ndarray | None) -> None:
        """Learn what was published at a flag."""
        for source, count in self.published.get(flag, {}).items():
            self._learn(w, source, count, lanes)
            for other, known in self.releases[source][count - 1].foreign.items():
                self._learn(w, other, known, lanes)

    def _learn(self, w, source: Source, count: int, lanes: np.ndarray | None) -> None:
        clocks = w.cluster.state.clocks
        if source[0] == w.cluster.number:
            clocks.join(w.agent, self.releases[source][count - 1].know, lanes)
        else:
            clocks.learn(w.agent, clocks.agent(("cluster", *source)), count, lanes)

    def observe(self, w, flag: tuple) -> None:
        """A relaxed read of a flag: acquires with the next fence."""
        self.pending[w.cluster.number, w.agent].append(flag)

    def fence(self, w) -> None:
        """A memory fence: relaxed reads before it now acquire."""
        for flag in self.pending.pop((w.cluster.number, w.agent), ()):
            self.acquire(w, flag, None)

    def known(self, w, know: np.ndarray, cluster: int) -> tuple[np.ndarray, np.ndarray]:
        """Clocks of another cluster's agents that are seen, and that are fenced as well."""
        seen = fenced = np.zeros(0, np.int32)
        for key, agent in w.cluster.state.clocks.agents.items():
            if key[:2] != ("cluster", cluster) or not know[SEEN, agent]:
                continue
            releases = self.releases[key[1:]]
            release = releases[know[SEEN, agent] - 1].know
            seen, fenced = _larger(seen, release[SEEN]), _larger(fenced, release[FENCED])
            if know[FENCED, agent]:
                # A proxy fence after the acquire covers all that was acquired.
                fenced = _larger(fenced, releases[know[FENCED, agent] - 1].know[SEEN])
        return seen, fenced


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = max(len(a), len(b))
    return np.maximum(np.pad(a, (0, width - len(a))), np.pad(b, (0, width - len(b))))
