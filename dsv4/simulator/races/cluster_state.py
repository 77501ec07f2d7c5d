"""Clocks and shadows of a simulated cluster, as the race monitor keeps them."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.machine.memory import SHARED_BYTES, TMEM_COLUMNS, Cluster, Cta
from dsv4.simulator.machine.warp import ALL
from dsv4.simulator.races.cells.granules import TMEM_GROUPS
from dsv4.simulator.races.cells.shadow import Shadow
from dsv4.simulator.races.order.clocks import EVER, Clocks
from dsv4.simulator.races.order.lanes import LaneOrder
from dsv4.simulator.races.reads_in_flight import ReadsInFlight


class ClusterState:
    """Clocks and shadows of one cluster."""

    def __init__(self, cluster: Cluster, warps: list):
        self.clocks = Clocks(len(warps))
        self.shared = [Shadow(SHARED_BYTES // 4) for _ in cluster.ctas]
        self.atomics: dict[int, Shadow] = {}  # CTA rank -> the last atomic on each word
        self.strong_reads: dict[int, Shadow] = {}  # the same of strong loads
        self._tmem: dict[int, Shadow] = {}
        # mbarrier address -> (agent, clock) of its init; initialised but not yet fenced.
        self.inits: dict[int, tuple[int, int]] = {}
        self.unfenced: set[int] = set()
        # Warp and mbarrier address -> the last phase that the warp waited for.
        self.waited: dict[tuple[int, int], int] = {}
        # CTA rank -> which 4-byte granules are live mbarriers.
        self.barriers: dict[int, np.ndarray] = {}
        self.counts: dict[tuple, int] = {}
        # CTA rank -> warp of another CTA, engine of one or engine that copies into it -> (clock,
        # instruction) of its last access there.
        self.remote: dict[int, dict[int, tuple[int, int]]] = {}
        # Warp -> agent of its commits to a barrier of another CTA -> how many: told on by what the
        # warp releases next.
        self.commits: dict[int, dict[int, int]] = {}
        # CTA rank and first column of an allocation that the peer of the CTA has freed, but not yet
        # the CTA itself -> (columns, instruction).
        self.freed: dict[tuple[int, int], tuple[int, int]] = {}
        self.flights = ReadsInFlight(SHARED_BYTES // 4)
        # By warp: its clock after its first wait for the cluster barrier, which every CTA reached.
        self.gathered = np.full(len(warps), EVER, np.int32)
        self.met: set[tuple[int, int]] = set()  # warps that know of a CTA, its rank, that it runs
        for i, warp in enumerate(warps):
            warp.agent, warp.order = i, LaneOrder(i, self.clocks)

    def tmem(self, cta: Cta) -> Shadow:
        """The history of a CTA's TMEM."""
        found = self._tmem.get(cta.rank)
        if found is None:
            found = self._tmem[cta.rank] = Shadow(TMEM_COLUMNS * TMEM_GROUPS)
        return found

    def count(self, key: tuple) -> int:
        """Next clock of an engine."""
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]


def lanes_of(w, mask) -> np.ndarray | None:
    """The lanes of a mask, None if they are all the warp still has; settles collectives."""
    w.order.catch_up(w.collectives)
    if mask is None or mask is ALL:
        return None
    live = w.frames[0].mask_bytes if w.frames else w.mask_bytes
    return None if mask.tobytes() == live else mask
