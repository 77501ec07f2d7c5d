"""Tensor maps that threads write in the launch in which copies read them.

Copies read their map through a proxy of its own. What a thread has written to the map's 128 bytes
they see behind a release to that proxy (fence.proxy.tensormap::generic.release, or
tensormap.cp_fenceproxy, which is one for what it writes itself) and an acquire from it of the map's
address, by the CTA that copies. Maps of kernel parameters, and those that nothing writes while the
kernel runs, need neither. A map counts as read when a copy is issued; that one under way still
reads it is not followed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from dsv4.simulator.instructions.operands.tensor_map import MAP_BYTES
from dsv4.simulator.ptx.qualifiers import Scope
from dsv4.simulator.races.cells.histories import Read
from dsv4.simulator.races.cells.shadow import place
from dsv4.simulator.races.cluster_state import ClusterState, lanes_of
from dsv4.simulator.races.order.clocks import SEEN
from dsv4.simulator.races.owners import AGENT, AGENT_BITS, distance_of, owner_of

STALE = "missing tensor map fence"
_FENCE = "fence.proxy.tensormap::generic"
_WORDS = np.arange(MAP_BYTES // 4)


class MapFence(NamedTuple):
    """A release to the proxy of tensor maps by lanes of a warp, or an acquire from it."""

    owner: int
    rank: int  # of the CTA
    clock: int
    scope: Scope
    lanes: np.ndarray | None
    know: np.ndarray  # [row, agent]

    def covers(self, owner: int, clock: int) -> bool:
        """Whether a write of a warp of its cluster, or of an engine, comes before it."""
        agent = owner & AGENT
        seen = self.know[SEEN]
        same = owner >> AGENT_BITS == self.owner >> AGENT_BITS
        return same and agent < len(seen) and int(seen[agent]) >= clock


class TensorMapReads:
    """Part of the checker of global memory: copies' reads of their tensor maps."""

    def __init__(self) -> None:
        self.map_releases: list[MapFence] = []
        self.map_acquires: dict[int, list[MapFence]] = defaultdict(list)

    def map_fence(self, w, address: int | None, mask) -> None:
        """An acquire of the map at an address, or a release (None)."""
        state, lanes = w.cluster.state, lanes_of(w, mask)
        parts = self.monitor.entry.instructions[w.at].parts
        scope = next(scope for scope in Scope if scope.name.lower() in parts)
        know = state.clocks.view(w.agent, lanes).copy()
        clock, owner = int(know[SEEN, w.agent]), owner_of(w, w.agent)
        kept = self.map_releases if address is None else self.map_acquires[address]
        kept.append(MapFence(owner, w.cta.rank, clock, scope, lanes, know))
        state.clocks.advance(w.agent)

    def map_read(self, w, address: int, mask) -> None:
        """A copy that one lane starts reads the map at an address."""
        history = self.history(w.cluster.memory.find(address, address + MAP_BYTES))
        what, lane = "tensor copy's read of its map in", int(mask.argmax())
        where = history.refined((address - history.region.start >> 2) + _WORDS)
        know = w.cluster.state.clocks.view(w.agent, lanes_of(w, mask))
        clock, code = int(know[SEEN, w.agent]), place(w.at, lane)
        history.note_read(Read(where, 0, owner_of(w, w.agent), clock, code))
        w.order.note(history, owner_of(w, w.agent), where)
        if not history.written or self._after_writes(w, history, where, know, what):
            return
        if w.order.unsettled:
            self._between_lanes(w, history, where, lane, False, what)
        writes = np.stack((history.writer[where], history.write_clock[where]))
        for owner, clock in np.unique(writes[:, writes[0] >= 0], axis=1).T.tolist():
            lacking = self._lacking(w, address, lane, know, owner, clock)
            if lacking:
                i = int(np.flatnonzero((writes[0] == owner) & (writes[1] == clock))[0])
                code = int(history.write_at[where][i])
                self._report(w, history, STALE, what, where, i, code, "write", lacking)
                return

    def _lacking(self, w, address: int, lane: int, know, owner: int, clock: int) -> str:
        """The fence that is missing between a write and a copy's read of a map, if any."""
        far = distance_of(w, owner)
        told = [release for release in self.map_releases if release.covers(owner, clock)]
        if not any(far <= release.scope for release in told):
            return f"{_FENCE}.release"
        for acquire in reversed(self.map_acquires[address]):
            if far > acquire.scope or not self._is_known(w, acquire, lane, know):
                continue
            seen = _widened(acquire.know, w.cluster.state)
            owners, clocks = (np.array(x) for x in zip(*((r.owner, r.clock) for r in told)))
            if not self._late(w, owners, clocks, seen, SEEN).all():
                return ""
        return f"{_FENCE}.acquire"

    @staticmethod
    def _is_known(w, fence: MapFence, lane: int, know) -> bool:
        """Whether a fence of the CTA comes before what a lane of a warp does."""
        if fence.owner >> AGENT_BITS != w.cluster.number or fence.rank != w.cta.rank:
            return False
        if fence.owner != owner_of(w, w.agent):
            return int(know[SEEN, fence.owner & AGENT]) >= fence.clock
        is_own = fence.lanes is None or bool(fence.lanes[lane])
        return is_own or fence.clock < w.order.synced


def _widened(know: np.ndarray, state: ClusterState) -> np.ndarray:
    """Clocks of a while ago, which know nothing of agents that are newer."""
    missing = state.clocks.know.shape[-1] - know.shape[-1]
    return np.pad(know, ((0, 0), (0, missing))) if missing else know
