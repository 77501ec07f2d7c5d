"""Happens-before over global memory, within and between clusters.

Strong accesses (atomics, acquire, release, relaxed, volatile) synchronise (see flags.py). They are
in conflict with ordinary accesses, those of launches before among them: a poll must not find what
they left. With each other strong accesses are in conflict only where the scope of one of them does
not include the other thread. Reads are kept in a list until there is a write to the allocation:
most of them are of inputs. Of each cell the last two readers are known.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.machine.memory import OFFSET_MASK, SHARED_WINDOW, Cta, GlobalMemory, Region
from dsv4.simulator.machine.warp import ALL
from dsv4.simulator.ptx.qualifiers import Order, Scope
from dsv4.simulator.races.cells.histories import (
    EARLIER_LAUNCH,
    UNAWAITED_LAUNCH,
    UNTOUCHED,
    Footprint,
    History,
    Read,
)
from dsv4.simulator.races.cells.shadow import SEVERAL, other_lanes, place, place_of
from dsv4.simulator.races.cluster_state import lanes_of
from dsv4.simulator.races.findings import CONVERGENCE, NARROW, relation
from dsv4.simulator.races.order.clocks import FENCED_GLOBAL, SEEN
from dsv4.simulator.races.order.flags import Flags
from dsv4.simulator.races.owners import AGENT, AGENT_BITS, distance_of, owner_of
from dsv4.simulator.races.strong_loads import StrongLoads
from dsv4.simulator.races.tensor_maps import TensorMapReads

INCOHERENT = "non-coherent read of data written in the launch"
LAUNCH_BEFORE = ("launch before",)  # an agent: clock 1 is its end
_LANES = np.arange(32)


class GlobalRaces(StrongLoads, TensorMapReads):
    """Checker of one launch's accesses to global memory; reports through the monitor."""

    def __init__(
        self, monitor, before: GlobalRaces | None, undefined: tuple = (), guessed: tuple = ()
    ):
        super().__init__()
        self.monitor, self.before = monitor, before
        self.undefined, self.guessed = undefined, guessed
        self.waited = before is None  # for the launches before, by some thread
        self.flags = Flags()
        self.narrow = False
        self.histories: dict[int, History] = {}

    def prepare(self, launch) -> None:
        """Look at a launch: how its clusters lie on GPUs, and whether any access has a scope that
        other CTAs may be outside of."""
        self.flags.clusters_per_gpu = launch.clusters_per_gpu
        widest = Scope.SYS if launch.config.peers else Scope.GPU
        self.narrow = any(
            ins.order.strong and ins.order.scope < widest
            for ins in self.monitor.entry.instructions
            if ins.parts[0] in ("ld", "st", "atom", "red")
        )

    def history(self, region: Region) -> History:
        """The history of an allocation."""
        found = self.histories.get(region.start)
        if found is None:
            found = self.histories[region.start] = History(region)
            for start, stop in self.undefined:
                if region.start <= start < region.stop:
                    found.declare_undefined(start - region.start, stop - region.start)
            if self.before is not None:
                self._follow(found, self.before)
        return found

    @staticmethod
    def _follow(history: History, before: GlobalRaces) -> None:
        """Take over what the launches before did to an allocation."""
        held = before.histories.get(history.region.start)
        if held is None and before.before is not None:
            held = before.history(history.region)
        if held is not None:
            # The launch before is complete only after those that it waited for.
            older = EARLIER_LAUNCH if before.waited else UNAWAITED_LAUNCH
            history.follow(held.footprint(earlier=True), older)
            history.follow(held.footprint(), EARLIER_LAUNCH)

    def footprints(self) -> dict[int, Footprint]:
        """What this launch touched, by the start of the allocation."""
        histories = self.histories.items()
        return {start: history.footprint() for start, history in histories}

    def adopt(self, memory: GlobalMemory, footprints: dict[int, Footprint]) -> None:
        """Take over what another process's clusters touched, for the launch that follows."""
        for start, footprint in footprints.items():
            self.history(memory.find(start, start + 1)).follow(footprint, 0)

    # --- ordinary and strong accesses ------------------------------------------------------------
    def access(self, w, active: np.ndarray, mask, size: int, write: bool) -> None:
        """A load or store of `size` bytes at each active lane's address."""
        order = self.monitor.entry.instructions[w.at].order
        lanes = lanes_of(w, mask)
        if order.strong and not write:
            if self.before is not None:
                know = w.cluster.state.clocks.view(w.agent, lanes)
                waited = know[SEEN, w.cluster.state.clocks.agent(LAUNCH_BEFORE)]
                if not waited and self._is_guess(active):
                    return
                self._strong_load_of_earlier(w, active, know, size)
            self._strong_load(w, active, mask, lanes, size, order)
            for address in np.unique(active).tolist():
                self.flags.read(w, ("global", address), order, lanes)
            return
        self._touch(w, active, mask, lanes, size, write, order.strong)
        if order.strong:
            for address in np.unique(active).tolist():
                self.flags.write(w, ("global", address), order, False, lanes)

    def _touch(self, w, active: np.ndarray, mask, lanes, size: int, write: bool, atomic: bool):
        memory = w.cluster.memory
        numbers = _LANES if mask is ALL else np.flatnonzero(mask)
        region = memory.find(int(active[0]), int(active[0]) + size)
        offsets = active.astype(np.int64) - region.start
        inside = (offsets >= 0) & (offsets < region.stop - region.start)
        if not inside.all():  # a warp's access to several allocations
            rest = ~inside
            self._touch_part(w, active[rest], numbers[rest], lanes, size, write, atomic)
            offsets, numbers = offsets[inside], numbers[inside]
        self._touch_region(w, region, offsets, numbers, lanes, size, write, atomic)

    def _touch_part(self, w, active, numbers, lanes, size: int, write: bool, atomic: bool) -> None:
        for address, number in zip(active.tolist(), numbers):
            region = w.cluster.memory.find(address, address + size)
            offsets = np.array([address - region.start])
            one = np.array([number])
            self._touch_region(w, region, offsets, one, lanes, size, write, atomic)

    def _touch_region(
        self, w, region: Region, offsets, numbers, lanes, size: int, write: bool, atomic: bool
    ) -> None:
        history, state, order = self.history(region), w.cluster.state, w.order
        know, owner = state.clocks.view(w.agent, lanes), owner_of(w, w.agent)
        clock = int(state.clocks.seen[w.agent, w.agent])
        where, whose = history.cells(offsets, size, numbers)
        what = "atomic on" if atomic else "write of" if write else "read of"
        self._conflicts(w, history, where, whose, know, write, what, owner)
        others = history.atomics(needed=atomic)
        if others is not None:
            words, whose_words = others.cells(offsets & ~3, max(size, 4), numbers)
            if atomic:
                if self.narrow:
                    self._within_scope(
                        w, others, words, know, self.monitor.entry.instructions[w.at].order, what
                    )
                code = place(w.at, whose_words)
                others.note_write(words, owner, clock, code)
                # The last one hides those before it: the last two owners are kept as readers are.
                others.note_read(Read(words, 0, owner, clock, code))
                order.note(others, owner, words)
                return
            self._conflicts(w, others, words, whose_words, know, False, what, owner)
            self._after_atomics(w, others, words, know, what, owner)
        code = place(w.at, whose)
        if write:
            self._after_strong_reads(w, history, where, know, what, owner)
            history.note_write(where, owner, clock, code)
        else:
            self._defined(w, history, where, what)
            if "nc" in self.monitor.entry.instructions[w.at].parts:
                self._incoherent_read(w, history, where, code)
            history.note_read(Read(where, 0, owner, clock, code))
        order.note(history, owner, where)

    def _defined(self, w, history: History, where, what: str) -> None:
        """Reads of allocations that held nothing come after writes."""
        missing = history.first_undefined(where) if history.undefined is not None else None
        if missing is not None:
            message = (
                f"{what} {history.region.name} at byte {history.offset(int(where[missing]))} by "
                f"{self.monitor.warp_at(w, w.at)}: nothing was written there"
            )
            self.monitor.report("uninitialised read", message, (w.at,), (w.at,))

    def _incoherent_read(self, w, history: History, where, code) -> None:
        """ld.global.nc: of words that nothing in the launch writes, before or after."""
        history.note_incoherent(where, code)
        for table in (history, history.atomics(needed=False)):
            written = table.writer[where] >= 0 if table is not None else np.zeros(1, np.bool_)
            if written.any():
                i = int(written.argmax())
                earlier = int(table.write_at[where][i])
                what = "non-coherent read of"
                self._report(w, history, INCOHERENT, what, where, i, earlier, "write")
                return

    def _after_incoherent(self, w, history: History, where, what: str) -> None:
        if history.incoherent is None:
            return
        codes = history.incoherent[where]
        if codes.any():
            i = int(codes.argmax())
            code = int(codes[i]) - 1
            self._report(w, history, INCOHERENT, what, where, i, code, "non-coherent read")

    def _within_scope(
        self, w, others: History, words, know, order: Order, what: str
    ) -> None:  # fmt: skip
        """Strong accesses that nothing orders must include each other in their scopes."""
        others.settle_reads()
        tables = (
            (others.writer, others.write_clock, others.write_at),
            *zip(others.reader, others.read_clock, others.read_at),
        )
        for writer, clock, at in tables:
            late = self._late(w, writer[words], clock[words], know, SEEN)
            for i in np.flatnonzero(late & (writer[words] >= 0)).tolist():
                owner, code = int(writer[words][i]), int(at[words][i])
                earlier = self.monitor.entry.instructions[place_of(code)[0]].order
                distance = distance_of(w, owner)
                # The reductions of asynchronous copies are of the GPU's scope.
                if distance > min(order.scope, earlier.scope if earlier.strong else Scope.GPU):
                    self._report(w, others, NARROW, what, words, i, code, "access")
                    return

    def _conflicts(
        self, w, history: History, where, whose, know, write: bool, what: str, owner: int
    ) -> None:
        if write:
            history.settle_reads()
            self._after_incoherent(w, history, where, what)
        if history.untouched(where, write):
            return
        if history.written:
            self._after_writes(w, history, where, know, what)
        if write:
            self._after_reads(w, history, where, know, what, owner)
        if w.order.unsettled:
            self._between_lanes(w, history, where, whose, write, what)

    # --- asynchronous engines --------------------------------------------------------------------
    def engine_reads(
        self, w, source, agent: int, clock: int, mask, generic: bool = False
    ) -> None:  # fmt: skip
        """A copy reads `source` = (address, offsets in 4-byte cells); unless the engine is a
        `generic` one, ordinary writes before it need a proxy fence."""
        lanes = lanes_of(w, mask)
        history, base, cells = self._source(w, source)
        if history is None:
            return
        if history.written:
            where = history.refined(cells + base)
            know = w.cluster.state.clocks.view(w.agent, lanes)
            raced = self._after_writes(w, history, where, know, "asynchronous read of")
            if not raced and not generic:
                self._after_fence(w, history, where, know, "asynchronous read of")
            if w.order.unsettled:
                number = SEVERAL if lanes is None else int(lanes.argmax())
                self._between_lanes(w, history, where, number, False, "asynchronous read of")
        others = history.atomics(needed=False)
        if others is not None:
            know = w.cluster.state.clocks.view(w.agent, lanes)
            self._after_writes(w, others, cells + base, know, "asynchronous read of")
        if history.undefined is not None:
            self._defined(w, history, history.refined(cells + base), "asynchronous read of")
        read = Read(cells, base, owner_of(w, agent), clock, place(w.at, SEVERAL))
        history.note_read(read)

    def engine_writes(
        self, w, target, agent: int, clock: int, mask, reduction: bool = False
    ) -> None:  # fmt: skip
        """A copy or reduction writes `target`; reductions do not conflict with each other."""
        lanes = lanes_of(w, mask)
        history, base, cells = self._source(w, target)
        if history is None:
            return
        where = history.refined(cells + base)
        know = w.cluster.state.clocks.view(w.agent, lanes)
        what = "asynchronous write of"
        history.settle_reads()
        self._after_incoherent(w, history, where, what)
        if not self._after_writes(w, history, where, know, what):
            self._after_fence(w, history, where, know, what)
        self._after_reads(w, history, where, know, what, UNTOUCHED)
        self._after_strong_reads(w, history, where, know, what, UNTOUCHED)
        if w.order.unsettled:
            number = SEVERAL if lanes is None else int(lanes.argmax())
            self._between_lanes(w, history, where, number, True, what)
        others = history.atomics(needed=reduction)
        if others is not None and not reduction:
            self._after_writes(w, others, cells + base, know, what)
        if reduction:
            others.note_write(cells + base, owner_of(w, agent), clock, place(w.at, SEVERAL))
        else:
            history.note_write(where, owner_of(w, agent), clock, place(w.at, SEVERAL))

    def _source(self, w, source):
        address, cells = source
        if not len(cells):
            return None, 0, cells
        region = w.cluster.memory.find(address + 4 * int(cells[0]), address + 4 * int(cells[0]) + 1)
        return self.history(region), (address - region.start) >> 2, cells

    # --- checks ----------------------------------------------------------------------------------
    def _late(self, w, owner: np.ndarray, clock: np.ndarray, know: np.ndarray, row: int):
        """Which accesses of these owners at these clocks are not in a row of `know`."""
        clusters, agents = owner >> AGENT_BITS, owner & AGENT
        mine = clusters == w.cluster.number
        late = mine & (clock > know[row][np.where(mine, agents, 0)])
        if self.before is not None and not know[SEEN, w.cluster.state.clocks.agent(LAUNCH_BEFORE)]:
            late |= owner == EARLIER_LAUNCH
        late |= owner == UNAWAITED_LAUNCH
        others = ~mine & (owner >= 0)
        for other in np.unique(clusters[others]).tolist() if others.any() else ():
            known = self.flags.known(w, know, other)[row]
            theirs = clusters == other
            padded = np.append(known, 0)  # agents that are not known of at all
            late |= theirs & (clock > padded[np.minimum(agents, len(known))])
        return late

    def _after_writes(self, w, history: History, where, know, what: str) -> bool:
        late = self._late(w, history.writer[where], history.write_clock[where], know, SEEN)
        if not late.any():
            return False
        i = int(late.argmax())
        kind = "read-write race" if "read" in what else "write-write race"
        owner, code = int(history.writer[where][i]), int(history.write_at[where][i])
        if owner < UNTOUCHED:
            self._report_launch(w, history, what, int(where[i]), "writes", owner)
        else:
            self._report(w, history, kind, what, where, i, code, "write")
        return True

    def _after_fence(self, w, history: History, where, know, what: str) -> None:
        """Ordinary writes before an asynchronous access need a proxy fence."""
        writer = history.writer[where]
        late = self._late(w, writer, history.write_clock[where], know, FENCED_GLOBAL)
        late &= (writer >= 0) & ((writer & AGENT) < w.cluster.state.clocks.warps)
        if late.any():
            i = int(late.argmax())
            code = int(history.write_at[where][i])
            lacking = "fence.proxy.async"
            kind = "missing proxy fence"
            self._report(w, history, kind, what, where, i, code, "write", lacking)

    def _after_atomics(self, w, others: History, words, know, what: str, owner: int) -> None:
        """Ordinary accesses come after the atomics of the last two owners."""
        others.settle_reads()
        kind = "read-write race" if "read" in what else "write-write race"
        for slot in (0, 1):
            found = others.reader[slot, words]
            late = self._late(w, found, others.read_clock[slot, words], know, SEEN)
            late &= found != owner
            if late.any():
                i = int(late.argmax())
                code = int(others.read_at[slot, words][i])
                self._report(w, others, kind, what, words, i, code, "atomic")
                return

    def _after_reads(self, w, history: History, where, know, what: str, owner: int) -> None:
        for slot in (0, 1):
            reader = history.reader[slot, where]
            late = self._late(w, reader, history.read_clock[slot, where], know, SEEN)
            late &= reader != owner
            if late.any():
                i = int(late.argmax())
                code = int(history.read_at[slot, where][i])
                if reader[i] < UNTOUCHED:
                    owner = int(reader[i])
                    self._report_launch(w, history, what, int(where[i]), "reads", owner)
                else:
                    self._report(w, history, "read-write race", what, where, i, code, "read")
                return

    def _between_lanes(self, w, history: History, where, lanes, write: bool, what: str) -> None:
        """Conflicts with accesses of other lanes of the warp."""
        owner, order = owner_of(w, w.agent), w.order
        late = (history.writer[where] == owner) & (history.write_clock[where] >= order.synced)
        late &= other_lanes(history.write_at[where], lanes)
        clock, code, before = history.write_clock[where], history.write_at[where], "write"
        if write and not late.any():
            clock, code, before = history.read_clock[0, where], history.read_at[0, where], "read"
            late = (history.reader[0, where] == owner) & (clock >= order.synced)
            late &= other_lanes(code, lanes)
        if not late.any():
            return
        certain = late & (clock >= order.converged)
        i = int((certain if certain.any() else late).argmax())
        kind = "write-write race" if write and before == "write" else "read-write race"
        kind = kind if certain.any() else CONVERGENCE
        self._report(w, history, kind, what, where, i, int(code[i]), before)

    def _report_launch(
        self, w, history: History, what: str, cell: int, does: str, owner: int
    ) -> None:  # fmt: skip
        when = f"before griddepcontrol.wait: the launch before {does} it"
        if owner == UNAWAITED_LAUNCH:
            when = (
                f"while a launch that {does} it may still run: the launch between them has not "
                "waited for it"
            )
        message = (
            f"{what} {history.region.name} at byte {history.offset(cell)} by "
            f"{self.monitor.warp_at(w, w.at)} {when}"
        )
        self.monitor.report("race with the launch before", message, (w.at,), (w.at,))

    def _report(
        self, w, history: History, kind: str, what: str, where, i: int, code: int, before: str,
        lacking: str = "",
    ) -> None:  # fmt: skip
        at, lane = place_of(code)
        whose = "" if lane == SEVERAL else f" by lane {lane}"
        message = (
            f"{what} {history.region.name} at byte {history.offset(int(where[i]))} by "
            f"{self.monitor.warp_at(w, w.at)} "
            f"{relation(f'an earlier {before}{whose}{self._role_of(at)}', lacking)}"
        )
        if kind == CONVERGENCE:
            self.monitor.warn(kind, message, at, w.at)
        else:
            self.monitor.report(kind, message, tuple(sorted((at, w.at))), (at, w.at))

    def _role_of(self, at: int) -> str:
        """Whose an earlier access was, as far as its instruction says so."""
        role = self.monitor.role(at)
        return f" by a warp{role}" if role else ""

    # --- synchronisation -------------------------------------------------------------------------
    def atomic(self, w, space: str, address: np.ndarray, mask, size: int) -> None:
        """atom and red: release and acquire by their qualifiers, or by fences around them."""
        ins = self.monitor.entry.instructions[w.at]
        lanes = lanes_of(w, mask)
        active = address[mask]
        shared = np.full(len(active), space.startswith("shared"))
        if space == "generic":
            shared = active >= np.uint64(SHARED_WINDOW)
        if shared.any():
            self._shared_atomic(w, active[shared], mask, shared, size)
        if not shared.all():
            theirs = np.zeros(32, np.bool_)
            theirs[np.flatnonzero(mask)[~shared]] = True
            self._touch(w, active[~shared], theirs, lanes, size, True, True)
        for where, near in set(zip(active.tolist(), shared.tolist())):
            flag = self._shared_flag(w, where) if near else ("global", where)
            if ins.parts[0] == "atom":  # red does not say what it read
                self.flags.read(w, flag, ins.order, lanes)
            self.flags.write(w, flag, ins.order, True, lanes)

    @staticmethod
    def _shared_flag(w, address: int) -> tuple:
        return "shared", w.cluster.number, address & 0xFFFFFFFF

    def _shared_atomic(self, w, active: np.ndarray, mask, shared: np.ndarray, size: int) -> None:
        for lane, where in zip(np.flatnonzero(mask)[shared].tolist(), active.tolist()):
            where &= 0xFFFFFFFF
            one = np.arange(32) == lane
            offsets = np.array([where & OFFSET_MASK])
            self.monitor.shared_atomic(w, w.cluster.cta_at(where), offsets, one, size)

    def shared_flag(
        self, w, cta: Cta, offsets: np.ndarray, write: bool, order: Order, lanes
    ) -> None:  # fmt: skip
        """A strong load or store of shared memory."""
        for offset in np.unique(offsets).tolist():
            flag = self._shared_flag(w, cta.base | offset)
            if write:
                self.flags.write(w, flag, order, False, lanes)
            else:
                self.flags.read(w, flag, order, lanes)

    def fence(self, w, order: Order, lanes: np.ndarray | None) -> None:
        """A fence between threads, by some lanes."""
        self.flags.fence(w, order, lanes)
