"""Happens-before over TMEM and of the tensor cores' operands."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.instructions.operands.descriptors import MatrixDescriptor
from dsv4.simulator.instructions.operands.tensor_core import (
    Multiplication,
    operand_granules,
)
from dsv4.simulator.instructions.wgmma import operand_sizes as wgmma_sizes
from dsv4.simulator.machine.memory import Cta
from dsv4.simulator.races.cells.granules import (
    TMEM_GROUPS,
    accumulator_granules,
    column_granules,
    tile_granules,
    tmem_operand_granules,
)
from dsv4.simulator.races.cells.shadow import SEVERAL, Earlier, place
from dsv4.simulator.races.cluster_state import ClusterState
from dsv4.simulator.races.order.clocks import EVER, ORDERED, SEEN
from dsv4.simulator.races.shared_memory import SharedRaces

MISSING_FENCE = "missing tcgen05.fence"
FREED = "use of TMEM that a pair may have freed"


class TensorRaces(SharedRaces):
    """tcgen05 and wgmma."""

    def __init__(self, entry):
        super().__init__(entry)
        # A kernel with none at all (the habit of CuTeDSL's pipelines) is told once.
        self.tcgen05_fences = any(
            ins.opcode.startswith("tcgen05.fence") for ins in entry.instructions
        )

    # --- TMEM ------------------------------------------------------------------------------------
    def _tmem(self, w, cta: Cta, where, agent: int, clock: int, seen, write: bool, what: str):
        state = w.cluster.state
        self._remote(w, cta, agent, clock)
        if state.freed:
            self._still_held(w, cta, where, what)
        shadow, settled = state.tmem(cta), state.clocks.settled[w.agent]
        settled[agent] = EVER  # a warp's own work needs no fence
        plain = shadow.settled(where, seen, settled, None)
        earlier = None if plain else shadow.unordered_write(where, seen)
        if earlier:
            kind = "write-write race" if write else "read-write race"
            self.race(w, kind, f"{what} at {_column(where, earlier)}", earlier)
        elif not plain:
            self._settled(w, where, shadow.unordered_write(where, settled), what)
        if write:
            earlier = shadow.unordered_read(where, seen, agent)
            if earlier:
                text = f"{what} at {_column(where, earlier)}"
                self.race(w, "read-write race", text, earlier)
            else:
                self._settled(w, where, shadow.unordered_read(where, settled, agent), what)
            shadow.note_write(where, agent, clock, place(w.at, SEVERAL))
            return
        missing = None if plain else shadow.first_unwritten(where)
        if missing is not None:
            column = int(where[missing]) // TMEM_GROUPS
            message = f"{what} of {self.warp_at(w, w.at)} at TMEM column {column}"
            self.report("uninitialised read", message, (w.at,), (w.at,))
        shadow.note_read(where, agent, clock, place(w.at, SEVERAL))

    def _settled(self, w, where, earlier: Earlier | None, what: str) -> None:
        """Ordered by barriers, but without the pair of tcgen05 fences around them."""
        if earlier is not None:
            text = f"{what} at {_column(where, earlier)}"
            once = not self.tcgen05_fences
            pair = "pair of tcgen05.fence::before_thread_sync and ::after_thread_sync"
            self.race(w, MISSING_FENCE, text, earlier, warning=True, once=once, lacking=pair)

    def tmem_access(self, w, cta: Cta, columns, lanes, write: bool) -> None:
        """tcgen05.ld or .st, asynchronous until the matching wait."""
        state = w.cluster.state
        w.order.catch_up(w.collectives)
        kind = "tcgen05.st" if write else "tcgen05.ld"
        agent, clock = state.clocks.agent((kind, w.agent)), state.count((kind, w.agent))
        where = np.unique(columns * TMEM_GROUPS + lanes // 16)
        self._tmem(w, cta, where, agent, clock, state.clocks.seen[w.agent], write, kind)

    def tmem_free(self, w, ctas: list[Cta], start: int, columns: int) -> None:
        """tcgen05.dealloc: everything must be done with the columns, in both CTAs of a pair."""
        state, cta = w.cluster.state, w.cta
        w.order.catch_up(w.collectives)
        where = column_granules(start, columns, tuple(range(TMEM_GROUPS)))
        seen = state.clocks.seen[w.agent]
        state.freed.pop((cta.rank, start), None)
        self._tmem(w, cta, where, w.agent, int(seen[w.agent]), seen, True, "tcgen05.dealloc")
        state.tmem(cta).forget(where)
        for peer in ctas:
            if peer is not cta:
                self._free_of_peer(w, peer, start, columns, where)

    def _free_of_peer(self, w, peer: Cta, start: int, columns: int, where) -> None:
        """The other CTA of a pair must be done, too. Its own dealloc need not be ordered."""
        state = w.cluster.state
        shadow, seen = state.tmem(peer), state.clocks.seen[w.agent]
        earlier = shadow.unordered_write(where, seen)
        earlier = earlier or shadow.unordered_read(where, seen, w.agent)
        if earlier:
            text = f"tcgen05.dealloc, for {peer.name} too, at {_column(where, earlier)}"
            self.race(w, FREED, text, earlier)
        if start in peer.tmem_allocations:
            state.freed[peer.rank, start] = columns, w.at

    def _still_held(self, w, cta: Cta, where, what: str) -> None:
        """An access to columns that the other CTA of the pair has freed for both."""
        column = where // TMEM_GROUPS
        for (rank, start), (columns, at) in w.cluster.state.freed.items():
            inside = (column >= start) & (column < start + columns)
            if rank == cta.rank and inside.any():
                message = f"{what} of {self.warp_at(w, w.at)} after its peer's tcgen05.dealloc"
                self.report(FREED, message, (w.at, at), (w.at, at))

    def tmem_waited(self, w, kind: str) -> None:
        """tcgen05.wait."""
        state, name = w.cluster.state, f"tcgen05.{kind}"
        agent = state.clocks.agent((name, w.agent))
        state.clocks.learn(w.agent, agent, state.counts.get((name, w.agent), 0))

    def tmem_used(self, w) -> None:
        """Loaded registers are touched before tcgen05.wait::ld: tmem_registers.py judges how."""

    # --- tcgen05.mma -----------------------------------------------------------------------------
    def _tensor_core(self, w) -> tuple[int, int, np.ndarray]:
        """Agent, next clock and view of a warp's tensor-core work, which executes in order."""
        state = w.cluster.state
        w.order.catch_up(w.collectives)
        agent, clock = state.clocks.agent(("mma", w.agent)), state.count(("mma", w.agent))
        seen = state.clocks.seen[w.agent].copy()
        seen[agent] = EVER
        return agent, clock, seen

    def multiply(self, w, cta: Cta, product: Multiplication, lane: int | None = None) -> None:
        """tcgen05.mma: operands read, accumulator written."""
        form, group = product.form, product.group
        agent, clock, seen = self._tensor_core(w)
        first = cta.rank & ~(group - 1)
        for c in cta.cluster.ctas[first : first + group]:
            n = form.n // group
            tile = operand_granules(product.b, n, form.depth, form.b, form.b_k_major)
            self._engine_reads(w, c, tile, agent, clock, "tcgen05.mma operand B", lane)
            if product.a_in_tmem:
                where = tmem_operand_granules(product)
                self._tmem(w, c, where, agent, clock, seen, False, "tcgen05.mma operand A")
            else:
                tile = operand_granules(product.a, product.rows, form.depth, form.a, form.a_k_major)
                self._engine_reads(w, c, tile, agent, clock, "tcgen05.mma operand A", lane)
            for address, rows in zip(product.scales or (), (product.rows, form.n)):
                where = column_granules(address & 0xFFFF, -(-rows // 32), (0, 1))
                self._tmem(w, c, where, agent, clock, seen, False, "tcgen05.mma scales")
            where = accumulator_granules(product)
            if product.accumulate:
                self._tmem(w, c, where, agent, clock, seen, False, "tcgen05.mma accumulator")
            self._tmem(w, c, where, agent, clock, seen, True, "tcgen05.mma accumulator")

    def tmem_copy(
        self, w, cta: Cta, index, column: int, columns: int, lanes, lane: int | None = None
    ) -> None:
        """tcgen05.cp: shared memory read, TMEM written, in order with products."""
        agent, clock, seen = self._tensor_core(w)
        self._engine_reads(w, cta, np.unique(index >> 2), agent, clock, "tcgen05.cp", lane)
        where = column_granules(column, columns, tuple(np.unique(lanes // 16).tolist()))
        self._tmem(w, cta, where, agent, clock, seen, True, "tcgen05.cp")

    def commit(self, w, barriers: list):
        """tcgen05.commit: what it will publish; it acts as a fence::before_thread_sync.

        Arrivals in other CTAs come in no certain order: an agent that has seen one need not have
        seen the others, and the CTA must be told of each, by its barrier or by the warp.
        """
        state, remote = w.cluster.state, {}
        for barrier in barriers:
            self._check_init(w, barrier, engine=True)
            cta = w.cluster.cta_at(barrier.address)
            if cta is not w.cta:
                key = ("commits", barrier.address)
                agent, clock = state.clocks.agent(key), state.count(key)
                remote[barrier.address] = agent, clock
                self._remote(w, cta, agent, clock)
        state.commits.setdefault(w.agent, {}).update(remote.values())
        w.order.catch_up(w.collectives)
        know = state.clocks.know[w.agent].copy()
        know[SEEN, state.clocks.agent(("mma", w.agent))] = state.counts.get(("mma", w.agent), 0)
        np.maximum(know[ORDERED], know[SEEN], out=know[ORDERED])
        state.clocks.advance(w.agent)
        return state, know, remote

    def commit_done(self, ticket: tuple[ClusterState, np.ndarray, dict], barrier) -> None:
        """The commit arrives at one barrier."""
        state, know, remote = ticket
        if barrier.address in remote:
            agent, clock = remote[barrier.address]
            know = know.copy()
            know[SEEN, agent] = clock
        self._publish_at(state, barrier, know)

    # --- wgmma -----------------------------------------------------------------------------------
    def wgmma(self, w, form, a, b: int, majors) -> None:
        """wgmma reads its operands until its group is waited for by any warp of the warpgroup."""
        state = w.cluster.state
        n, depth, _, a_type, b_type = form
        if not w.wgmma_fenced:
            message = f"{w.cta.name} warp {w.number}: registers of wgmma used since the last fence"
            self.report("missing wgmma.fence", message, (w.at,), (w.at,))
        size_a, size_b = wgmma_sizes(a_type, b_type)
        agent = state.clocks.agent(("wgmma", w.cta.rank, w.number // 4))
        clock = w.wgmma_issued
        tile = tile_granules(MatrixDescriptor.wgmma(b), n, depth, size_b, not majors[1])
        self._engine_reads(w, w.cta, tile, agent, clock, "wgmma operand B")
        if not isinstance(a, tuple):
            tile = tile_granules(MatrixDescriptor.wgmma(a), 64, depth, size_a, not majors[0])
            self._engine_reads(w, w.cta, tile, agent, clock, "wgmma operand A")

    def wgmma_waited(self, w, clock: int) -> None:
        """wgmma.wait_group: products up to a number are complete."""
        state = w.cluster.state
        agent = state.clocks.agent(("wgmma", w.cta.rank, w.number // 4))
        state.clocks.learn(w.agent, agent, clock)


def _column(where: np.ndarray, earlier: Earlier) -> str:
    return f"TMEM column {int(where[earlier.index]) // TMEM_GROUPS}"
