"""Happens-before over shared memory, between warps, lanes and asynchronous engines."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.machine.memory import OFFSET_MASK, SHARED_BYTES, Cta
from dsv4.simulator.machine.warp import ALL
from dsv4.simulator.ptx.qualifiers import Scope
from dsv4.simulator.races.cells.granules import granules
from dsv4.simulator.races.cells.shadow import SEVERAL, Earlier, Shadow, place
from dsv4.simulator.races.cluster_state import ClusterState, lanes_of
from dsv4.simulator.races.findings import NARROW
from dsv4.simulator.races.lane_races import LaneRaces
from dsv4.simulator.races.order.clocks import (
    EVER,
    FENCED_GLOBAL,
    FENCED_SHARED,
    INITIALISED,
    SEEN,
)
from dsv4.simulator.races.reads_in_flight import incomplete_loads

OVERWRITTEN = "mbarrier overwritten"
IN_FLIGHT = "copy over a read in flight"
MISSING_FENCE, UNFENCED_COPY = "missing proxy fence", "cp.async without proxy fence"
UNFENCED_SENT = "st.async without proxy fence"
_OTHER_CTAS = "other CTAs"  # where arrivals from other CTAs at an mbarrier are published
_LANES = np.arange(32)
ONE_LANE = [lane == _LANES for lane in range(32)]


class SharedRaces(LaneRaces):
    """Ordinary accesses and atomics, engines' accesses, barriers and fences."""

    def __init__(self, entry):
        super().__init__(entry)
        self.loads_at_release = incomplete_loads(entry)
        self.strong_accesses = frozenset(
            ins.index for ins in entry.instructions
            if ins.order.strong and ins.parts[0] in ("ld", "st")
        )  # fmt: skip
        self.watched_loads = frozenset(at for ats in self.loads_at_release.values() for at in ats)

    # --- ordinary accesses -----------------------------------------------------------------------
    def shared(
        self, w, cta: Cta, offsets: np.ndarray, mask, size: int, write: bool, values=None
    ) -> None:
        """A load or store of `size` bytes per lane; mask None is the warp acting as one. `values`
        are those of a store."""
        state, agent = w.cluster.state, w.agent
        lanes = lanes_of(w, mask)
        if w.at in self.strong_accesses:
            self._strong(w, cta, offsets, mask, size, write, lanes)
            return
        self._remote(w, cta)
        if mask is None:
            whose = SEVERAL
        else:
            whose = _LANES if mask is ALL else np.flatnonzero(mask)
        shadow, know = state.shared[cta.rank], state.clocks.view(agent, lanes)
        where, numbers = shadow.cells(offsets, size, whose)
        order, seen = w.order, know[SEEN]
        kind = "write-write race" if write else "read-write race"
        what = f"{'write' if write else 'read'} of shared memory at"
        raced = self._against_writes(w, cta, shadow, where, seen, kind, what)
        if order.unsettled:
            self._between_lanes(w, cta, shadow, where, numbers, write, what)
        if not raced and order.has_own_copies:
            self._behind_copies(w, cta, shadow, where, numbers, kind, what)
        atomics = state.atomics.get(cta.rank)
        if atomics is not None:
            words, whose = atomics.cells(np.asarray(offsets, np.int64) & ~3, max(size, 4), whose)
            self._against_writes(w, cta, atomics, words, seen, kind, what)
            self._between_lanes(w, cta, atomics, words, whose, False, what)
        clock, code = int(seen[agent]), place(w.at, numbers)
        if write:
            self._against_barriers(w, cta, offsets, size, "write of")
            self._against_reads(w, cta, where, seen, agent, what)
            self._against_strong_reads(w, cta, where, seen, what)
            if values is not None and isinstance(numbers, np.ndarray) and len(offsets) > 1:
                self._within_store(w, offsets, mask, values)
            shadow.note_write(where, agent, clock, code)
        else:
            self._initialised(w, cta, where, f"{self.warp_at(w, w.at)} reads")
            if w.at in self.watched_loads:
                cells = granules(np.asarray(offsets, np.int64) & ~3, max(size, 4))
                state.flights.read(agent, w.at, cta.rank, cells)
            if isinstance(numbers, np.ndarray):
                shadow.note_lane_reads(where, agent, clock, code, order.synced)
            else:
                shadow.note_read(where, agent, clock, code)
        order.note(shadow, agent, where)

    def _strong(self, w, cta: Cta, offsets, mask, size: int, write: bool, lanes) -> None:
        """A strong load or store, which synchronises: in conflict with ordinary accesses alone."""
        if write:
            self.shared_atomic(w, cta, offsets, mask, size)
        else:
            self._strong_load(w, cta, offsets, mask, size, lanes)
        order = self.entry.instructions[w.at].order
        self.memory.shared_flag(w, cta, offsets, write, order, lanes)

    def _strong_load(self, w, cta: Cta, offsets, mask, size: int, lanes) -> None:
        state, what = w.cluster.state, "strong read of shared memory at"
        self._remote(w, cta)
        shadow, seen = state.shared[cta.rank], state.clocks.view(w.agent, lanes)[SEEN]
        numbers = _LANES if mask is ALL else np.flatnonzero(mask)
        where, _ = shadow.cells(offsets, size, numbers)
        self._against_writes(w, cta, shadow, where, seen, "read-write race", what)
        self._initialised(w, cta, where, f"{self.warp_at(w, w.at)} reads")
        strong = state.strong_reads.setdefault(cta.rank, Shadow(shadow.count))
        words, _ = strong.cells(np.asarray(offsets, np.int64) & ~3, max(size, 4), SEVERAL)
        strong.note_read(words, w.agent, int(seen[w.agent]), place(w.at, SEVERAL))

    def _against_strong_reads(self, w, cta: Cta, where, seen, what: str) -> None:
        """Ordinary writes come after the strong loads of the word, polls above all."""
        strong = w.cluster.state.strong_reads.get(cta.rank)
        if strong is not None:
            words = w.cluster.state.shared[cta.rank].words_of(where)
            self._against_reads(w, cta, words, seen, w.agent, what, strong)

    def _against_writes(
        self, w, cta: Cta, shadow: Shadow, where, seen, kind: str, what: str
    ) -> bool:
        earlier = shadow.unordered_write(where, seen)
        if earlier:
            self.race(w, kind, f"{what} {self._at(w, cta, where, earlier)}", earlier)
        return earlier is not None and not earlier.weak

    def _against_reads(
        self, w, cta: Cta, where, seen, agent: int, what: str, shadow: Shadow | None = None
    ) -> None:
        shadow = shadow or w.cluster.state.shared[cta.rank]
        earlier = shadow.unordered_read(where, seen, agent)
        if earlier:
            text = f"{what} {self._at(w, cta, where, earlier)}"
            self.race(w, "read-write race", text, earlier)

    def _against_barriers(self, w, cta: Cta, offsets, size: int, what: str) -> None:
        """A write to live mbarriers: only mbarrier instructions may touch them until .inval."""
        live = w.cluster.state.barriers.get(cta.rank)
        if live is None:
            return
        places = np.asarray(offsets, np.int64)
        hit = live[places >> 2] | live[(places + (size - 1)) >> 2]
        if size > 16:  # st.bulk
            first, last = int(places[0]) >> 2, int(places[0] + size - 1) >> 2
            hit = live[first : last + 1].any(keepdims=True)
        if hit.any():
            offset = int(places[int(hit.argmax())])
            message = f"{what} {self.shared_place(cta, offset)}, a live mbarrier"
            self.report(OVERWRITTEN, message, (w.at,), (w.at,))

    def _initialised(self, w, cta: Cta, where, what: str) -> None:
        shadow = w.cluster.state.shared[cta.rank]
        missing = shadow.first_unwritten(where)
        if missing is not None:
            place = self.entry.shared_names.place(shadow.offset(int(where[missing])))
            message = f"{what} shared memory at {place}"
            self.report("uninitialised read", message, (w.at,), (w.at,))

    # --- atomics ---------------------------------------------------------------------------------
    def shared_atomic(self, w, cta: Cta, offsets: np.ndarray, mask, size: int) -> None:
        """An atomic operation on shared memory: in no race with other atomics, if the scopes of
        those of several CTAs include the cluster."""
        state, agent = w.cluster.state, w.agent
        lanes = lanes_of(w, mask)
        self._remote(w, cta)
        shadow, know = state.shared[cta.rank], state.clocks.view(agent, lanes)
        atomics = state.atomics.setdefault(cta.rank, Shadow(shadow.count))
        words, numbers = atomics.cells(
            np.asarray(offsets, np.int64) & ~3, max(size, 4), np.flatnonzero(mask)
        )
        where = shadow.refined(words)
        if len(where) != len(words):
            numbers = SEVERAL if len(offsets) > 1 else numbers[0]
        seen, what = know[SEEN], "atomic on shared memory at"
        self._against_writes(w, cta, shadow, where, seen, "write-write race", what)
        self._against_reads(w, cta, where, seen, agent, what)
        if w.order.unsettled:
            self._between_lanes(w, cta, shadow, where, numbers, True, what)
        self._initialised(w, cta, where, f"atomic of {self.warp_at(w, w.at)} on")
        self._within_scope(w, cta, atomics, words, seen, what)
        atomics.note_write(words, agent, int(seen[agent]), place(w.at, numbers))
        w.order.note(atomics, agent, words)

    def _within_scope(self, w, cta: Cta, atomics: Shadow, words, seen, what: str) -> None:
        """The last atomic of another CTA on a word comes before this one, or both have a scope
        that includes the other thread."""
        earlier = atomics.unordered_write(words, seen)
        if earlier is None or earlier.agent // len(w.cta.warps) == w.cta.rank:
            return
        instructions = self.entry.instructions
        if min(instructions[at].order.scope for at in (earlier.at, w.at)) < Scope.CLUSTER:
            self.race(w, NARROW, f"{what} {self._at(w, cta, words, earlier)}", earlier)

    # --- asynchronous engines --------------------------------------------------------------------
    def _engine_reads(
        self, w, cta: Cta, where, agent: int, clock: int, what: str, lane: int | None = None
    ) -> None:
        """An asynchronous engine started by `w` (one lane of it, or all) reads shared memory."""
        state = w.cluster.state
        self._remote(w, cta, agent, clock)
        shadow = state.shared[cta.rank]
        where = shadow.refined(where)
        lanes = lanes_of(w, None if lane is None else ONE_LANE[lane])
        know = state.clocks.view(w.agent, lanes)
        text = f"{what} of shared memory at"
        raced = False
        if not shadow.settled(where, know[SEEN], know[FENCED_SHARED], state.clocks.ordinary):
            kind = "read-write race"
            raced = self._against_writes(w, cta, shadow, where, know[SEEN], kind, text)
            if not raced:
                self._proxy_fenced(w, cta, where, know, text)
            self._initialised(w, cta, where, f"{what} of {cta.name} reads")
        if w.order.unsettled:
            self._between_lanes(w, cta, shadow, where, _number(lane), False, text)
        if not raced and w.order.has_own_copies:
            kind = "read-write race"
            self._behind_copies(w, cta, shadow, where, _number(lane), kind, text)
        shadow.note_read(where, agent, clock, place(w.at, SEVERAL))

    def _proxy_fenced(self, w, cta: Cta, where, know, text: str) -> None:
        """Ordinary writes, by warps, need the fence; engines' writes do not. Its lack behind
        cp.async is warned of: PTX does not except it, but NVIDIA's own main loops go without.
        Behind st.async, too, of whose proxy PTX says nothing."""
        shadow, clocks = w.cluster.state.shared[cta.rank], w.cluster.state.clocks
        for below, is_copy in ((clocks.warps, False), (clocks.ordinary, True)):
            earlier = shadow.unfenced_write(where, know[FENCED_SHARED], below, is_copy)
            if earlier:
                text = f"{text} {self._at(w, cta, where, earlier)}"
                of_copies = UNFENCED_SENT if earlier.agent >= clocks.ordinary else UNFENCED_COPY
                kind, lacking = of_copies if is_copy else MISSING_FENCE, "fence.proxy.async"
                self.race(w, kind, text, earlier, lacking=lacking, warning=is_copy)
                return

    def _engine_writes(
        self, w, cta: Cta, where, agent: int, clock: int, what: str,
        lane: int | np.ndarray | None = None, generic: bool = False,
    ) -> None:  # fmt: skip
        """An engine, started by all of `w`, by one lane, or by a lane for each granule, writes
        shared memory; `generic` engines need no proxy fence."""
        state = w.cluster.state
        self._remote(w, cta)
        shadow = state.shared[cta.rank]
        of_each = isinstance(lane, np.ndarray)
        lanes = lanes_of(w, None if of_each or lane is None else ONE_LANE[lane])
        know = state.clocks.view(w.agent, lanes)
        text = f"{what} into shared memory at"
        if len(where):
            self._against_barriers(w, cta, where << 2, 4, f"{what} into")
        if state.flights.late and not generic:
            self._against_flights(w, cta, where, know[SEEN], text)
        if of_each:
            where, numbers = shadow.refined_of(where, lane)
        else:
            where, numbers = shadow.refined(where), _number(lane)
        if not shadow.settled(where, know[SEEN], know[FENCED_SHARED], state.clocks.ordinary):
            kind = "write-write race"
            raced = self._against_writes(w, cta, shadow, where, know[SEEN], kind, text)
            if not raced and not generic:
                self._proxy_fenced(w, cta, where, know, text)
        self._against_reads(w, cta, where, know[SEEN], agent, text)
        if w.order.unsettled:
            self._between_lanes(w, cta, shadow, where, numbers, True, text)
        if not generic:
            state.remote.setdefault(cta.rank, {})[agent] = (clock, w.at)
        shadow.note_write(where, agent, clock, place(w.at, numbers if of_each else SEVERAL))
        if generic and agent >= state.clocks.ordinary:
            shadow.mark_copied(where)

    def _against_flights(self, w, cta: Cta, where: np.ndarray, seen: np.ndarray, text: str) -> None:
        found = w.cluster.state.flights.under(cta.rank, where, seen)
        if found is not None:
            agent, at, clock, index = found
            earlier = Earlier(agent, at, SEVERAL, clock, index)
            text = f"{text} {self._at(w, cta, where, earlier)}"
            self.race(w, IN_FLIGHT, text, earlier)

    # --- other CTAs of the cluster ---------------------------------------------------------------
    def _remote(self, w, cta: Cta, agent: int | None = None, clock: int = 0) -> None:
        """A warp, or an engine it started, reaches into another CTA, which must have started and
        not have exited."""
        if cta is w.cta:
            return
        state = w.cluster.state
        if (w.agent, cta.rank) not in state.met:
            self._meet(w, cta)
        if agent is None:
            agent, clock = w.agent, int(state.clocks.seen[w.agent, w.agent])
        state.remote.setdefault(cta.rank, {})[agent] = (clock, w.at)
        if all(warp.done for warp in cta.warps):
            self._gone(cta, w.at)

    def _meet(self, w, cta: Cta) -> None:
        """The warp must know of anything that a warp of the CTA did, or of a cluster barrier."""
        state = w.cluster.state
        know = state.clocks.know[w.agent]
        own = slice(cta.warps[0].agent, cta.warps[-1].agent + 1)
        gathered = know[SEEN, : len(state.gathered)] >= state.gathered
        if know[SEEN, own].any() or know[INITIALISED, own].any() or gathered.any():
            state.met.add((w.agent, cta.rank))
            return
        message = f"nothing makes {w.cta.name} wait for the start of {cta.name}"
        self.report("access to a CTA that may not have started", message, (w.at,), (w.at,))

    def exited(self, w) -> None:
        """A warp is done. By the last one, its CTA must know of every access from other CTAs and
        of every copy into it."""
        state, cta = w.cluster.state, w.cta
        if not all(warp.done for warp in cta.warps):
            return
        agents = [warp.agent for warp in cta.warps]
        for other, (clock, at) in state.remote.get(cta.rank, {}).items():
            if (state.clocks.seen[agents, other] < clock).all():
                self._gone(cta, at)

    def _gone(self, cta: Cta, at: int) -> None:
        message = f"nothing makes {cta.name} wait for this before it exits"
        self.report("access to a CTA that may have exited", message, (at,), (at,))

    # --- threads and barriers --------------------------------------------------------------------
    def release(self, w, key: tuple, mask=None) -> None:
        """Arrival of a warp, or some lanes of it, at a barrier of the CTA."""
        lanes = lanes_of(w, mask)
        w.order.covers(lanes)
        self._tell_commits(w)
        w.cluster.state.clocks.release(w.agent, key, lanes)
        w.order.leave_behind(lanes)
        self._leave_loads(w)

    def _arrive(self, w, mask, keys: dict[Scope, tuple]) -> None:
        """Arrival of some lanes at an mbarrier or the cluster barrier: what it tells threads at
        each distance is published under the key given for it."""
        clocks, order = w.cluster.state.clocks, self.entry.instructions[w.at].order
        lanes = lanes_of(w, mask)
        w.order.covers(lanes)
        self._tell_commits(w)
        for distance, key in keys.items():
            know = clocks.told(w.agent, lanes, order, distance)
            if know is not None:
                clocks.publish(key, know)
        clocks.advance(w.agent)
        w.order.leave_behind(lanes)
        self._leave_loads(w)

    def cluster_arrive(self, w, generation: int, mask) -> None:
        """barrier.cluster.arrive."""
        key = ("cluster", generation)
        self._arrive(w, mask, {Scope.CLUSTER: key, Scope.CTA: (*key, w.cta.rank)})

    def cluster_wait(self, w, generation: int, mask) -> None:
        """barrier.cluster.wait."""
        key = ("cluster", generation)
        state = w.cluster.state
        state.clocks.acquire(w.agent, (*key, w.cta.rank), lanes_of(w, mask))
        self.acquire(w, key, mask)
        if state.gathered[w.agent] == EVER:
            state.gathered[w.agent] = state.clocks.advance(w.agent)

    def _tell_commits(self, w) -> None:
        """What learns anything of a warp after its commits counts as told of their arrivals."""
        state = w.cluster.state
        for agent, clock in state.commits.pop(w.agent, {}).items():
            state.clocks.learn(w.agent, agent, clock)

    def _leave_loads(self, w) -> None:
        """Loads that are still under way are not covered by the release just made."""
        loads = self.loads_at_release.get(w.at)
        if loads is not None:
            state = w.cluster.state
            clock = int(state.clocks.seen[w.agent, w.agent])
            state.flights.released(w.agent, loads, clock)

    def acquire(self, w, key: tuple, mask=None) -> None:
        """A warp, or some lanes of it, leave a barrier; a whole warp's lanes are then ordered."""
        lanes = lanes_of(w, mask)
        w.cluster.state.clocks.acquire(w.agent, key, lanes)
        if lanes is None:
            w.order.sync()

    def warp_sync(self, w) -> None:
        """bar.warp.sync."""
        w.order.sync()

    def fence(self, w, opcode: str, mask=None) -> None:
        """Fences of every kind, by some lanes or all."""
        state, clocks, agent = w.cluster.state, w.cluster.state.clocks, w.agent
        lanes, order = lanes_of(w, mask), self.entry.instructions[w.at].order
        if opcode.startswith(("fence.proxy.async", "fence.mbarrier_init")):
            state.unfenced -= {a for a in state.unfenced if state.inits[a][0] == agent}
        if opcode.startswith("fence.mbarrier_init"):
            clocks.init_fence(agent)
        elif opcode.startswith("fence.proxy.async"):
            clocks.proxy_fence(agent, lanes, _fenced_row(opcode))
        elif opcode.startswith("tcgen05.fence::before"):
            clocks.before_thread_sync(agent)
            return
        elif opcode.startswith("tcgen05.fence::after"):
            clocks.after_thread_sync(agent)
            return
        if order.strong:
            self.memory.fence(w, order, lanes)
            clocks.fence(agent, order, lanes)
        clocks.advance(agent)  # what the warp writes from now on, the fence does not cover
        if order.releases and not order.restricted:
            w.order.leave_behind(lanes)

    def barrier_init(self, w, address: int) -> None:
        """mbarrier.init."""
        state = w.cluster.state
        cta, first = w.cluster.cta_at(address), (address & OFFSET_MASK) >> 2
        live = state.barriers.setdefault(cta.rank, np.zeros(SHARED_BYTES // 4, np.bool_))
        if live[first]:
            place = self.shared_place(cta, 4 * first)
            message = f"mbarrier at {place}, live and not invalidated"
            self.report("mbarrier initialised again", message, (w.at,), (w.at,))
        live[first : first + 2] = True
        state.inits[address] = (w.agent, int(state.clocks.seen[w.agent, w.agent]))
        state.unfenced.add(address)

    def barrier_inval(self, w, address: int) -> None:
        """mbarrier.inval."""
        cta, first = w.cluster.cta_at(address), (address & OFFSET_MASK) >> 2
        w.cluster.state.barriers[cta.rank][first : first + 2] = False

    def _check_init(self, w, barrier, engine: bool = False) -> None:
        state = w.cluster.state
        if engine and barrier.address in state.unfenced:
            message = f"asynchronous arrival on {barrier}, whose init no fence made visible to it"
            self.report("missing mbarrier_init fence", message, (w.at,), (w.at,))
        agent, clock = state.inits[barrier.address]
        know = state.clocks.know[w.agent]
        if max(know[SEEN, agent], know[INITIALISED, agent]) < clock:
            message = f"use of {barrier} by {self.warp_at(w, w.at)}"
            self.report("barrier used before its init is visible", message, (w.at,), (w.at,))

    def release_barrier(self, w, barrier, mask=None) -> None:
        """Arrival of some lanes at an mbarrier."""
        self._check_init(w, barrier)
        cta = w.cluster.cta_at(barrier.address)
        self._remote(w, cta)
        key = ("mbarrier", barrier.address, barrier.phase)
        # Only threads of its own CTA wait for an mbarrier.
        keys = {Scope.CTA: key} if cta is w.cta else {Scope.CLUSTER: (*key, _OTHER_CTAS)}
        self._arrive(w, mask, keys)

    def acquire_barrier(self, w, barrier, mask=None) -> None:
        """Some lanes waited for the last phase of an mbarrier."""
        self._check_init(w, barrier)
        clocks, order = w.cluster.state.clocks, self.entry.instructions[w.at].order
        lanes = lanes_of(w, mask)
        self._check_parity(w, barrier, lanes)
        key = ("mbarrier", barrier.address, barrier.phase - 1)
        if not order.acquires:
            clocks.observe(w.agent, key, Scope.CTA, lanes)
            if order.scope >= Scope.CLUSTER:
                clocks.observe(w.agent, (*key, _OTHER_CTAS), Scope.CLUSTER, lanes)
            return
        own = clocks.acquire(w.agent, key, lanes)
        if order.scope >= Scope.CLUSTER:
            own = max(own, clocks.acquire(w.agent, (*key, _OTHER_CTAS), lanes))
        if lanes is None:
            w.order.covered(own)

    def _check_parity(self, w, barrier, lanes: np.ndarray | None) -> None:
        """A wait for a phase has the parity of the phase before last, which is complete: it passes
        at once unless the phase between is known to be complete, too."""
        state, last = w.cluster.state, barrier.phase - 1
        before = state.waited.get((w.agent, barrier.address))
        state.waited[w.agent, barrier.address] = last
        if last < 1 or before == last - 1 or before == last:
            return
        know = state.clocks.view(w.agent, lanes)[SEEN]
        key = ("mbarrier", barrier.address, last - 1)
        for part in (key, (*key, _OTHER_CTAS)):
            told = state.clocks.published.get(part)
            if told is not None and (told[SEEN] > know[: told.shape[1]]).any():
                message = (
                    f"{self.warp_at(w, w.at)} waits for phase {last} of {barrier}, and nothing "
                    f"tells it that phase {last - 1} is complete: until it is, the wait passes at "
                    "once"
                )
                self.report("wait may pass two phases early", message, (w.at,), (w.at,))
                return

    def _publish_at(self, state: ClusterState, barrier, know: np.ndarray) -> None:
        state.clocks.publish(("mbarrier", barrier.address, barrier.phase), know)


def _number(lane: int | None) -> int:
    return SEVERAL if lane is None else lane


def _fenced_row(opcode: str) -> int | None:
    """The row of clocks that a fence.proxy.async is for; None for both state spaces."""
    if ".global" in opcode:
        return FENCED_GLOBAL
    return FENCED_SHARED if ".shared" in opcode or "sync_restrict" in opcode else None
