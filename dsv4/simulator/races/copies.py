"""Happens-before of asynchronous copies: both their shared and their global side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.machine.memory import Cta
from dsv4.simulator.races.cells.granules import granules
from dsv4.simulator.races.cluster_state import ClusterState, lanes_of
from dsv4.simulator.races.order.clocks import SEEN
from dsv4.simulator.races.shared_memory import ONE_LANE, SharedRaces


class Ticket(NamedTuple):
    """A copy into shared memory under way.

    Attributes:
        know: what is told with the copy.
        agents: the agent that copies, by the address of the mbarrier that the copy completes on.
        told: mbarriers and phases at which that was published.
    """

    state: ClusterState
    know: np.ndarray
    agents: dict[int, int]
    told: set[tuple[int, int]]


class CopyRaces(SharedRaces):
    """Bulk and tensor copies, st.async, cp.async. `source` and `target` are the global side of a
    copy: 4-byte cells as (address, offsets in cells), or None."""

    # --- into shared memory ----------------------------------------------------------------------
    def bulk_load(self, w, receivers, offsets: np.ndarray, lane: int | None = None, source=None):
        """A copy into shared memory: its bytes are known once its mbarrier's phase is."""
        ticket = self._copy_into(w, receivers, granules(offsets, 16), "bulk copy", lane)
        if source is not None:
            (_, address), *_ = receivers
            agent, clock = ticket[2][address], w.cluster.barrier(address).phase + 1
            self.memory.engine_reads(w, source, agent, clock, _mask(lane))
        return ticket

    def cluster_copy(self, w, offsets: np.ndarray, address: int, lane: int) -> None:
        """The source of a copy to another CTA's shared memory, read until its mbarrier's phase."""
        agent = w.cluster.state.clocks.agent(("copies", address))
        clock = w.cluster.barrier(address).phase + 1
        self._engine_reads(w, w.cta, granules(offsets, 16), agent, clock, "bulk copy", lane)

    def store_async(
        self, w, cta: Cta, barrier, offsets: np.ndarray, size: int, lanes: np.ndarray
    ) -> list[Ticket]:
        """st.async: a small copy of each lane, which completes on an mbarrier.

        They count as one copy, unless lanes know of different things or write to one place.
        """
        receivers, cells = [(cta, barrier.address)], granules(offsets, size)
        is_one = not w.cluster.state.clocks.differ(w.agent) and len(np.unique(cells)) == len(cells)
        if is_one:
            of_each = np.repeat(lanes, size // 4)
            ticket = self._copy_into(w, receivers, cells, "st.async", of_each, generic=True)
            return [ticket] * len(lanes)
        return [
            self._copy_into(w, receivers, where, "st.async", lane, generic=True)
            for where, lane in zip(cells.reshape(len(lanes), -1), lanes.tolist())
        ]

    def _copy_into(
        self, w, receivers, where: np.ndarray, what: str, lane: int | np.ndarray | None,
        generic: bool = False,
    ) -> Ticket:  # fmt: skip
        """A copy that all of a warp, one lane, or a lane for each granule of it, started."""
        state = w.cluster.state
        clocks, agents = state.clocks, {}
        for cta, address in receivers:
            barrier = w.cluster.barrier(address)
            self._check_init(w, barrier, engine=True)
            agent = clocks.agent(("copies", address))
            agents[address] = agent
            self._engine_writes(w, cta, where, agent, barrier.phase + 1, what, lane, generic)
        lanes = lanes_of(w, _mask(lane))
        w.order.covers(lanes)
        ticket = Ticket(state, clocks.view(w.agent, lanes).copy(), agents, set())
        clocks.advance(w.agent)
        w.order.leave_behind(lanes)
        return ticket

    def bulk_load_done(self, ticket: Ticket, cta: Cta, barrier) -> None:
        """The copy into one CTA, or a lane's part of it, is complete."""
        phase = barrier.address, barrier.phase
        if phase in ticket.told:
            return
        ticket.told.add(phase)
        known = ticket.know.copy()
        known[SEEN, ticket.agents[barrier.address]] = barrier.phase + 1
        self._publish_at(ticket.state, barrier, known)

    # --- out of shared memory --------------------------------------------------------------------
    def bulk_store(
        self, w, cta: Cta, offsets: np.ndarray, lane: int | None = None, target=None, op=None
    ) -> None:
        """A copy or reduction (`op`) out of shared memory, in the open bulk group."""
        state = w.cluster.state
        agent = state.clocks.agent(("bulk stores", w.agent))
        clock = state.counts.get(("bulk groups", w.agent), 0) + 1
        self._engine_reads(w, cta, granules(offsets, 16), agent, clock, "bulk store", lane)
        if target is not None:
            agent = state.clocks.agent(("writes of bulk stores", w.agent))
            self.memory.engine_writes(
                w, target, agent, clock, _mask(lane), reduction=op is not None
            )

    def bulk_committed(self, w) -> None:
        """cp.async.bulk.commit_group."""
        w.cluster.state.count(("bulk groups", w.agent))

    def bulk_waited(self, w, mask=None) -> None:
        """One more bulk group has read its sources."""
        self._bulk_done(w, "bulk stores", mask)

    def bulk_written(self, w, mask=None) -> None:
        """One more bulk group is complete: its writes are visible to the lanes that waited."""
        self._bulk_done(w, "writes of bulk stores", mask)

    def _bulk_done(self, w, engine: str, mask) -> None:
        state = w.cluster.state
        done = state.count((f"waits for {engine}", w.agent))
        agent = state.clocks.agent((engine, w.agent))
        state.clocks.learn(w.agent, agent, done, lanes_of(w, mask))

    # --- cp.async --------------------------------------------------------------------------------
    def copy_issue(self, w, moves, size: int) -> int:
        """cp.async by some lanes: `moves` holds (lane, shared offset, address, bytes) of each."""
        state = w.cluster.state
        agent = state.clocks.agent(("cp.async", w.agent))
        clock = state.count(("cp.async", w.agent))
        where = granules(np.array([offset for _, offset, _, _ in moves]), size)
        lanes = np.repeat([lane for lane, *_ in moves], size // 4)
        # Copies of one warp into one place are ordered like the instructions.
        self._engine_writes(w, w.cta, where, agent, clock, "cp.async", lanes, generic=True)
        w.order.copies.append((state.shared[w.cta.rank], where, clock))
        for _, _, address, wanted in moves:
            if wanted:
                source = (address & ~3, np.arange(-(-(wanted + address % 4) // 4)))
                self.memory.engine_reads(w, source, agent, clock, None, generic=True)
        return clock

    def copy_waited(self, w, clock: int) -> None:
        """cp.async.wait_group: copies up to a number are complete."""
        state = w.cluster.state
        w.order.catch_up(w.collectives)
        agent = state.clocks.agent(("cp.async", w.agent))
        w.order.wait_for_copies(clock, int(state.clocks.know[w.agent][SEEN, agent]))
        state.clocks.learn(w.agent, agent, clock)

    def snapshot_copies(self, w):
        """What cp.async.mbarrier.arrive will publish once the copies before it are complete: these
        alone, for it is the system that arrives, not the thread with what it has written itself."""
        state = w.cluster.state
        know = np.zeros_like(state.clocks.know[w.agent])
        agent = state.clocks.agent(("cp.async", w.agent))
        know[SEEN, agent] = state.counts.get(("cp.async", w.agent), 0)
        w.order.copies.clear()
        state.clocks.advance(w.agent)
        return state, know

    def release_snapshot(self, snapshot, barrier) -> None:
        """The arrival of cp.async.mbarrier.arrive happens."""
        state, know = snapshot
        self._publish_at(state, barrier, know)


def _mask(lane: int | np.ndarray | None) -> np.ndarray | None:
    """The mask of one lane or some; None for all."""
    if lane is None or not isinstance(lane, np.ndarray):
        return None if lane is None else ONE_LANE[lane]
    mask = np.zeros(32, np.bool_)
    mask[lane] = True
    return mask
