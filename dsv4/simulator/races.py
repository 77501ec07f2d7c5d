"""The happens-before checker: every access of a cluster against the accesses before it.

Agents are warps and asynchronous engines (a warp's bulk stores, cp.async copies, TMEM loads and
stores, MMAs; a warpgroup's wgmmas; the copies that complete on one mbarrier). An engine's clock
counts its operations (or the barrier's phases); a warp learns it by waiting. Named barriers,
mbarriers and the cluster barrier carry clocks from arrivals to waits. Ordinary writes read by an
asynchronous engine also need a proxy fence on the way.

Not seen: races between lanes of one warp, and between two writes of less than 4 bytes into one
word.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.clocks import EVER, Clocks
from dsv4.simulator.descriptors import MatrixDescriptor
from dsv4.simulator.global_races import GlobalRaces
from dsv4.simulator.granules import (
    TMEM_GROUPS,
    accumulator_granules,
    column_granules,
    granules,
    tile_granules,
)
from dsv4.simulator.memory import SHARED_BYTES, TMEM_COLUMNS, Cluster, Cta
from dsv4.simulator.report import Finding
from dsv4.simulator.shadow import Shadow
from dsv4.simulator.tensor_core import Multiplication, operand_columns, operand_granules
from dsv4.simulator.wgmma import operand_sizes as wgmma_sizes

MAX_FINDINGS = 50
_ENGINES_PER_WARP, _BARRIERS_PER_CTA, _FOREIGN_CLUSTERS = 6, 128, 4096


class ClusterState:
    """Clocks and shadows of one cluster."""

    def __init__(self, cluster: Cluster, warps: list):
        capacity = (
            len(warps) * (1 + _ENGINES_PER_WARP)
            + _BARRIERS_PER_CTA * len(cluster.ctas)
            + min(_FOREIGN_CLUSTERS, len(cluster.launch.cluster_origins()))
        )
        self.clocks = Clocks(len(warps), capacity)
        self.shared = [Shadow(SHARED_BYTES // 4, capacity) for _ in cluster.ctas]
        self.tmem = [Shadow(TMEM_COLUMNS * TMEM_GROUPS, capacity) for _ in cluster.ctas]
        # mbarrier address -> (agent, clock) of its init; initialised but not yet fenced.
        self.inits: dict[int, tuple[int, int]] = {}
        self.unfenced: set[int] = set()
        self.counts: dict[tuple, int] = {}
        for i, warp in enumerate(warps):
            warp.agent = i

    def count(self, key: tuple) -> int:
        """Next clock of an engine."""
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]


class Monitor:
    """Receives every access and synchronisation of a launch; collects findings."""

    def __init__(self, entry):
        self.entry = entry
        self.findings: list[Finding] = []
        self.warnings: list[Finding] = []
        self._known: set[tuple] = set()
        self.memory = GlobalRaces(self)

    # --- life of a cluster -----------------------------------------------------------------------
    def start_cluster(self, cluster: Cluster, warps: list) -> None:
        cluster.state = ClusterState(cluster, warps)

    def finish_cluster(self, cluster: Cluster, warps: list) -> None:
        """What is left behind when every warp has exited."""
        for barrier in cluster.barriers.values():
            if barrier.transactions:
                self._leak(f"transaction count of {barrier} at exit")
        for warp in warps:
            if warp.wgmma_pending:
                self._leak(f"{warp.cta.name} warp {warp.number} exits with wgmma outstanding")
        cluster.state = None

    def exit_outstanding(self, warp, groups: int) -> None:
        """A warp that issued bulk stores has exited without waiting for their reads."""
        self._leak(
            f"{warp.cta.name} warp {warp.number} exits with {groups} bulk store groups "
            "not waited for: their shared memory may be gone before it is read"
        )

    # --- findings --------------------------------------------------------------------------------
    def _leak(self, message: str) -> None:
        self._report("leak", message, (), ())

    def _report(self, kind: str, message: str, key: tuple, places: tuple[int, ...]) -> None:
        key = (kind, *(key or (message,)))
        if key in self._known or len(self.findings) >= MAX_FINDINGS:
            return
        self._known.add(key)
        where = tuple(self.entry.instructions[p].where() for p in places)
        self.findings.append(Finding(kind, message, where))

    def adopt(self, findings: list[Finding], warnings: list[Finding]) -> None:
        """Add what another process found, once each."""
        for mine, theirs in ((self.findings, findings), (self.warnings, warnings)):
            mine += [
                f for f in theirs if all((f.kind, f.places) != (g.kind, g.places) for g in mine)
            ]

    def warn(self, kind: str, message: str, at: int) -> None:
        """A finding of the tolerated class."""
        if (kind, at) not in self._known:
            self._known.add((kind, at))
            where = (self.entry.instructions[at].where(),)
            self.warnings.append(Finding(kind, message, where))

    def _race(self, w, kind: str, what: str, earlier, state: ClusterState) -> None:
        agent, at, _ = earlier
        name = state.clocks.names[agent]
        message = f"{what} by {w.cta.name} warp {w.number} is not ordered after {_who(name)}"
        self._report(kind, message, (at, w.at), (at, w.at))

    # --- shared memory ---------------------------------------------------------------------------
    def shared(self, w, cta: Cta, offsets: np.ndarray, mask, size: int, write: bool) -> None:
        """An ordinary load or store of `size` bytes per lane."""
        state = w.cluster.state
        shadow, clock = state.shared[cta.rank], state.clocks.seen[w.agent]
        where = granules(offsets, size)
        part = size < 4
        earlier = shadow.unordered_write(where, clock, part and write)
        if earlier:
            kind = "write-write race" if write else "read-write race"
            what = "write of shared memory" if write else "read of shared memory"
            self._race(w, kind, f"{what} at {_at(cta, where, earlier)}", earlier, state)
        if write:
            earlier = shadow.unordered_read(where, clock, w.agent)
            if earlier:
                what = f"write of shared memory at {_at(cta, where, earlier)}"
                self._race(w, "read-write race", what, earlier, state)
            shadow.note_write(where, w.agent, int(clock[w.agent]), w.at, part)
        else:
            missing = shadow.first_unwritten(where)
            if missing is not None:
                offset = int(where[missing]) * 4
                message = f"{cta.name} warp {w.number} reads shared offset {offset:#x}"
                self._report("uninitialised read", message, (w.at,), (w.at,))
            shadow.note_read(where, w.agent, int(clock[w.agent]), w.at)

    def _engine_reads(self, w, cta: Cta, where, agent: int, clock: int, what: str) -> None:
        """An asynchronous engine started by `w` reads shared memory."""
        state = w.cluster.state
        shadow, clocks = state.shared[cta.rank], state.clocks
        seen = clocks.seen[w.agent]
        earlier = shadow.unordered_write(where, seen)
        if earlier:
            text = f"{what} of shared memory at {_at(cta, where, earlier)}"
            self._race(w, "read-write race", text, earlier, state)
        else:
            # Ordinary writes, by warps, need the fence; engines' writes do not.
            fenced = clocks.fenced[w.agent].copy()
            fenced[len(clocks.seen) :] = EVER
            earlier = shadow.unordered_write(where, fenced)
            if earlier:
                text = f"{what} of shared memory at {_at(cta, where, earlier)}"
                self._race(w, "missing proxy fence", text, earlier, state)
        missing = shadow.first_unwritten(where)
        if missing is not None:
            message = f"{what} of {cta.name} reads shared offset {int(where[missing]) * 4:#x}"
            self._report("uninitialised read", message, (w.at,), (w.at,))
        shadow.note_read(where, agent, clock, w.at)

    def _engine_writes(self, w, cta: Cta, where, agent: int, clock: int, what: str) -> None:
        state = w.cluster.state
        shadow, seen = state.shared[cta.rank], state.clocks.seen[w.agent]
        for kind, earlier in (
            ("write-write race", shadow.unordered_write(where, seen)),
            ("read-write race", shadow.unordered_read(where, seen, agent)),
        ):
            if earlier:
                text = f"{what} into shared memory at {_at(cta, where, earlier)}"
                self._race(w, kind, text, earlier, state)
        shadow.note_write(where, agent, clock, w.at)

    # --- threads and barriers --------------------------------------------------------------------
    def release(self, w, key: tuple, relaxed: bool = False) -> None:
        w.cluster.state.clocks.release(w.agent, key, relaxed=relaxed)

    def acquire(self, w, key: tuple) -> None:
        w.cluster.state.clocks.acquire(w.agent, key)

    def fence(self, w, opcode: str) -> None:
        clocks = w.cluster.state.clocks
        if opcode.startswith(("fence.proxy.async", "fence.mbarrier_init")):
            unfenced = w.cluster.state.unfenced
            unfenced -= {a for a in unfenced if w.cluster.state.inits[a][0] == w.agent}
        if opcode.startswith("fence.proxy.async"):
            clocks.proxy_fence(w.agent)
        elif opcode.startswith(("fence", "membar")):
            clocks.fence(w.agent)
            self.memory.fence(w)

    def barrier_init(self, w, address: int) -> None:
        state = w.cluster.state
        state.inits[address] = (w.agent, int(state.clocks.seen[w.agent, w.agent]))
        state.unfenced.add(address)

    def _check_init(self, w, barrier, engine: bool = False) -> None:
        state = w.cluster.state
        if engine and barrier.address in state.unfenced:
            message = f"asynchronous arrival on {barrier}, whose init no fence made visible to it"
            self._report("missing mbarrier_init fence", message, (w.at,), (w.at,))
        agent, clock = state.inits[barrier.address]
        if state.clocks.seen[w.agent, agent] < clock:
            message = f"use of {barrier} by {w.cta.name} warp {w.number}"
            self._report("barrier used before its init is visible", message, (w.at,), (w.at,))

    def release_barrier(self, w, barrier) -> None:
        self._check_init(w, barrier)
        self.release(w, ("mbarrier", barrier.address, barrier.phase))

    def acquire_barrier(self, w, barrier) -> None:
        self._check_init(w, barrier)
        self.acquire(w, ("mbarrier", barrier.address, barrier.phase - 1))

    def _publish_at(self, state: ClusterState, barrier, seen, fenced) -> None:
        state.clocks.publish(("mbarrier", barrier.address, barrier.phase), seen, fenced)

    # --- bulk copies -----------------------------------------------------------------------------
    def bulk_load(self, w, receivers, offsets: np.ndarray):
        """A copy into shared memory: its bytes are known once its mbarrier's phase is."""
        return self._copy_into(w, receivers, granules(offsets, 16), "bulk copy")

    def store_async(self, w, cta: Cta, barrier, offset: int, size: int):
        """st.async: a small copy that completes on an mbarrier."""
        where = granules(np.array([offset]), size)
        return self._copy_into(w, [(cta, barrier.address)], where, "st.async")

    def _copy_into(self, w, receivers, where: np.ndarray, what: str):
        state = w.cluster.state
        agents = {}
        for cta, address in receivers:
            barrier = w.cluster.barrier(address)
            self._check_init(w, barrier, engine=True)
            agent = state.clocks.agent(("copies", address))
            agents[address] = agent
            self._engine_writes(w, cta, where, agent, barrier.phase + 1, what)
        clocks = state.clocks
        ticket = (state, clocks.seen[w.agent].copy(), clocks.fenced[w.agent].copy(), agents)
        clocks.seen[w.agent, w.agent] += 1
        return ticket

    def bulk_load_done(self, ticket, cta: Cta, barrier) -> None:
        state, seen, fenced, agents = ticket
        known = seen.copy()
        known[agents[barrier.address]] = barrier.phase + 1
        self._publish_at(state, barrier, known, fenced)

    def bulk_store(self, w, cta: Cta, offsets: np.ndarray):
        state = w.cluster.state
        agent = state.clocks.agent(("bulk stores", w.agent))
        clock = state.counts.get(("bulk groups", w.agent), 0) + 1
        self._engine_reads(w, cta, granules(offsets, 16), agent, clock, "bulk store")

    def bulk_committed(self, w) -> None:
        w.cluster.state.count(("bulk groups", w.agent))

    def bulk_waited(self, w) -> None:
        state = w.cluster.state
        done = state.count(("bulk waits", w.agent))
        state.clocks.learn(w.agent, state.clocks.agent(("bulk stores", w.agent)), done)

    # --- cp.async --------------------------------------------------------------------------------
    def copy_issue(self, w, moves, size: int):
        state = w.cluster.state
        agent = state.clocks.agent(("cp.async", w.agent))
        clock = state.count(("cp.async", w.agent))
        where = granules(np.array([offset for offset, _, _ in moves]), size)
        # Copies of one warp into one place are ordered like the instructions.
        self._engine_writes(w, w.cta, where, agent, clock, "cp.async")
        return clock

    def copy_waited(self, w, clock: int) -> None:
        state = w.cluster.state
        state.clocks.learn(w.agent, state.clocks.agent(("cp.async", w.agent)), clock)

    def snapshot_copies(self, w):
        state = w.cluster.state
        seen = state.clocks.seen[w.agent].copy()
        seen[state.clocks.agent(("cp.async", w.agent))] = state.counts.get(("cp.async", w.agent), 0)
        state.clocks.seen[w.agent, w.agent] += 1
        return state, seen, state.clocks.fenced[w.agent].copy()

    def release_snapshot(self, snapshot, barrier) -> None:
        state, seen, fenced = snapshot
        self._publish_at(state, barrier, seen, fenced)

    # --- TMEM ------------------------------------------------------------------------------------
    def _tmem(self, w, cta: Cta, where, agent: int, clock: int, seen, write: bool, what: str):
        state = w.cluster.state
        shadow = state.tmem[cta.rank]
        earlier = shadow.unordered_write(where, seen)
        if earlier:
            kind = "write-write race" if write else "read-write race"
            column = int(where[earlier[2]]) // TMEM_GROUPS
            self._race(w, kind, f"{what} at TMEM column {column}", earlier, state)
        if write:
            earlier = shadow.unordered_read(where, seen, agent)
            if earlier:
                column = int(where[earlier[2]]) // TMEM_GROUPS
                self._race(w, "read-write race", f"{what} at TMEM column {column}", earlier, state)
            shadow.note_write(where, agent, clock, w.at)
            return
        missing = shadow.first_unwritten(where)
        if missing is not None:
            column = int(where[missing]) // TMEM_GROUPS
            message = f"{what} of {cta.name} warp {w.number} at TMEM column {column}"
            self._report("uninitialised read", message, (w.at,), (w.at,))
        shadow.note_read(where, agent, clock, w.at)

    def tmem_access(self, w, cta: Cta, columns, lanes, write: bool) -> None:
        """tcgen05.ld or .st, asynchronous until the matching wait."""
        state = w.cluster.state
        kind = "tcgen05.st" if write else "tcgen05.ld"
        agent, clock = state.clocks.agent((kind, w.agent)), state.count((kind, w.agent))
        where = np.unique(columns * TMEM_GROUPS + lanes // 16)
        self._tmem(w, cta, where, agent, clock, state.clocks.seen[w.agent], write, kind)

    def tmem_free(self, w, cta: Cta, start: int, columns: int) -> None:
        """tcgen05.dealloc: everything must be done with the columns."""
        state = w.cluster.state
        where = column_granules(start, columns, tuple(range(TMEM_GROUPS)))
        seen = state.clocks.seen[w.agent]
        self._tmem(w, cta, where, w.agent, int(seen[w.agent]), seen, True, "tcgen05.dealloc")
        state.tmem[cta.rank].forget(where)

    def tmem_waited(self, w, kind: str) -> None:
        state, name = w.cluster.state, f"tcgen05.{kind}"
        agent = state.clocks.agent((name, w.agent))
        state.clocks.learn(w.agent, agent, state.counts.get((name, w.agent), 0))

    def tmem_used(self, w) -> None:
        """Loaded registers used before tcgen05.wait::ld: the scoreboard covers it in practice."""
        self.warn("tcgen05.ld without wait", "registers used before tcgen05.wait::ld", w.at)
        self.tmem_waited(w, "ld")

    # --- tensor cores ----------------------------------------------------------------------------
    def _tensor_core(self, w) -> tuple[int, int, np.ndarray]:
        """Agent, next clock and view of a warp's tensor-core work, which executes in order."""
        state = w.cluster.state
        agent, clock = state.clocks.agent(("mma", w.agent)), state.count(("mma", w.agent))
        seen = state.clocks.seen[w.agent].copy()
        seen[agent] = EVER
        return agent, clock, seen

    def multiply(self, w, cta: Cta, product: Multiplication) -> None:
        """tcgen05.mma: operands read, accumulator written."""
        form, group = product.form, product.group
        agent, clock, seen = self._tensor_core(w)
        first = cta.rank & ~(group - 1)
        for c in cta.cluster.ctas[first : first + group]:
            n = form.n // group
            tile = operand_granules(product.b, n, form.depth, form.b, form.b_k_major)
            self._engine_reads(w, c, tile, agent, clock, "tcgen05.mma operand B")
            if product.a_in_tmem:
                columns = operand_columns(form.depth, form.a)
                where = column_granules(product.a & 0xFFFF, columns, tuple(range(TMEM_GROUPS)))
                self._tmem(w, c, where, agent, clock, seen, False, "tcgen05.mma operand A")
            else:
                tile = operand_granules(product.a, product.rows, form.depth, form.a, form.a_k_major)
                self._engine_reads(w, c, tile, agent, clock, "tcgen05.mma operand A")
            for address, rows in zip(product.scales or (), (product.rows, form.n)):
                where = column_granules(address & 0xFFFF, -(-rows // 32), (0, 1))
                self._tmem(w, c, where, agent, clock, seen, False, "tcgen05.mma scales")
            where = accumulator_granules(product)
            if product.accumulate:
                self._tmem(w, c, where, agent, clock, seen, False, "tcgen05.mma accumulator")
            self._tmem(w, c, where, agent, clock, seen, True, "tcgen05.mma accumulator")

    def tmem_copy(self, w, cta: Cta, index, column: int, columns: int, lanes) -> None:
        """tcgen05.cp: shared memory read, TMEM written, in order with products."""
        agent, clock, seen = self._tensor_core(w)
        self._engine_reads(w, cta, np.unique(index >> 2), agent, clock, "tcgen05.cp")
        where = column_granules(column, columns, tuple(np.unique(lanes // 16).tolist()))
        self._tmem(w, cta, where, agent, clock, seen, True, "tcgen05.cp")

    def commit(self, w, barriers: list):
        state = w.cluster.state
        for barrier in barriers:
            self._check_init(w, barrier, engine=True)
        seen = state.clocks.seen[w.agent].copy()
        seen[state.clocks.agent(("mma", w.agent))] = state.counts.get(("mma", w.agent), 0)
        ticket = (state, seen, state.clocks.fenced[w.agent].copy())
        state.clocks.seen[w.agent, w.agent] += 1
        return ticket

    def commit_done(self, ticket, barrier) -> None:
        state, seen, fenced = ticket
        self._publish_at(state, barrier, seen, fenced)

    def wgmma(self, w, form, a, b: int, majors) -> None:
        """wgmma reads its operands until its group is waited for by any warp of the warpgroup."""
        state = w.cluster.state
        n, depth, _, a_type, b_type = form
        if not w.wgmma_fenced:
            message = f"{w.cta.name} warp {w.number}: registers of wgmma used since the last fence"
            self._report("missing wgmma.fence", message, (w.at,), (w.at,))
        size_a, size_b = wgmma_sizes(a_type, b_type)
        agent = state.clocks.agent(("wgmma", w.cta.rank, w.number // 4))
        clock = w.wgmma_issued
        tile = tile_granules(MatrixDescriptor.wgmma(b), n, depth, size_b, not majors[1])
        self._engine_reads(w, w.cta, tile, agent, clock, "wgmma operand B")
        if not isinstance(a, tuple):
            tile = tile_granules(MatrixDescriptor.wgmma(a), 64, depth, size_a, not majors[0])
            self._engine_reads(w, w.cta, tile, agent, clock, "wgmma operand A")

    def wgmma_waited(self, w, clock: int) -> None:
        state = w.cluster.state
        agent = state.clocks.agent(("wgmma", w.cta.rank, w.number // 4))
        state.clocks.learn(w.agent, agent, clock)

    # --- global memory ---------------------------------------------------------------------------
    def global_access(self, w, active: np.ndarray, mask, size: int, write: bool) -> None:
        self.memory.access(w, active, size, write)

    def atomic(self, w, space: str, address: np.ndarray, mask, size: int) -> None:
        self.memory.atomic(w, space, address[mask])

    def global_race(self, w, what: str, before: str, at: int) -> None:
        kind = (
            "write-write race"
            if before == "write" and what.startswith("write")
            else ("read-write race")
        )
        message = f"{what} by {w.cta.name} warp {w.number} is not ordered after an earlier {before}"
        self._report(kind, message, (at, w.at), (at, w.at))


def _who(name: tuple) -> str:
    """An agent's name for people."""
    kind, *rest = name
    if kind == "warp":
        return f"the access of warp agent {rest[0]}"
    if kind == "copies":
        return f"the copy completing on the mbarrier at {rest[0]:#x}"
    return f"the {kind} of agent {rest}"


def _at(cta: Cta, where: np.ndarray, earlier) -> str:
    return f"offset {int(where[earlier[2]]) * 4:#x} of {cta.name}"
