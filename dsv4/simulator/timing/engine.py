"""Event-driven replay of recorded clusters on modelled SMs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dsv4.simulator.compile.program import Program
from dsv4.simulator.errors import SimulatorError
from dsv4.simulator.machine.memory import RANK_SHIFT
from dsv4.simulator.timing import trace
from dsv4.simulator.timing.costs import Segment, make_segment, targets_and_sources
from dsv4.simulator.timing.machine import Machine
from dsv4.simulator.timing.trace import ClusterTrace, Key, WarpTrace
from dsv4.simulator.timing.units import SUBCORES, MemoryRates, Sm

QUANTUM = 24  # issue slots after which another warp of the sub-core may come in between
STORE_QUEUE = 64  # passes of the shared-memory port that stores may lag behind


@dataclass(frozen=True, slots=True)
class Span:
    """`name` took [start, stop) cycles on `track`, which belongs to an SM."""

    track: str
    name: str
    start: float
    stop: float
    sm: int


@dataclass(frozen=True)
class Replayed:
    """Outcome of a replay: cycles until the last warp is done, by unit, and its spans."""

    cycles: float
    busy: dict[str, float]
    waiting: dict[str, float]  # cycles of all warps, by what they waited for
    spans: list[Span]


class _Warp:
    """A warp under way."""

    __slots__ = (
        "bulk_groups",
        "cluster",
        "copies",
        "core",
        "late",
        "name",
        "part",
        "segment",
        "sm",
        "steps",
        "time",
        "tmem",
        "trace",
        "wgmmas",
    )  # fmt: skip

    def __init__(self, warp: WarpTrace, cluster: int, sm: Sm, index: int, steps: Iterator):
        self.trace, self.cluster, self.sm, self.steps = warp, cluster, sm, steps
        self.core = sm.subcores[warp.number % SUBCORES]
        self.name = f"SM {index} CTA {cluster}.{warp.cta} warp {warp.number}"
        self.time = 0.0
        self.late: dict[str, float] = {}  # registers that arrive in the future
        self.tmem = [0.0, 0.0]  # loads, stores complete
        self.wgmmas: dict[int, float] = {}
        self.copies: dict[int, float] = {}
        self.bulk_groups: dict[int, float] = {}
        self.segment: Segment | None = None
        self.part = 0


class Replay:
    """Clusters that start together, each CTA on the SM it is given.

    Args:
        program: the kernel's blocks.
        clusters: what ran.
        placement: SM of each CTA, by cluster and rank.
        rates: of each SM.
    """

    def __init__(
        self,
        program: Program,
        clusters: Sequence[ClusterTrace],
        placement: Sequence[Sequence[int]],
        machine: Machine,
        rates: MemoryRates,
    ):
        self.program, self.machine = program, machine
        self.placement = placement
        self.sms = [Sm(machine, rates) for _ in range(1 + max(max(p) for p in placement))]
        self.mma_done = [0.0] * len(self.sms)
        self.signals = [dict(cluster.signals) for cluster in clusters]
        self.completion: dict[tuple[int, Key], float] = {}
        self.blocked: dict[tuple[int, Key], list[_Warp]] = {}
        self.heap: list[tuple[float, int, _Warp]] = []
        self.spans: list[Span] = []
        self.waiting: dict[str, float] = {}
        self._segments: dict[tuple[int, int], Segment] = {}
        self._serial = 0
        for i, cluster in enumerate(clusters):
            for warp in cluster.warps:
                sm = placement[i][warp.cta]
                self._push(_Warp(warp, i, self.sms[sm], sm, self._steps(warp)))
        self._handlers: dict[type, Callable] = {
            trace.SharedAccess: self._shared, trace.GlobalAccess: self._global,
            trace.Signal: self._signal, trace.Wait: self._wait,
            trace.BulkLoad: self._bulk_load, trace.RemoteStore: self._remote_store,
            trace.BulkStore: self._bulk_store,
            trace.BulkWait: self._bulk_wait, trace.AsyncCopy: self._copy,
            trace.AsyncCopyArrive: self._copy_arrive, trace.AsyncCopyWait: self._copy_wait,
            trace.Multiply: self._multiply, trace.Commit: self._commit,
            trace.TmemCopy: self._tmem_copy,
            trace.WarpgroupMultiply: self._wgmma, trace.WarpgroupWait: self._wgmma_wait,
            trace.TmemAccess: self._tmem, trace.TmemWait: self._tmem_wait,
        }  # fmt: skip

    def run(self) -> Replayed:
        """Replay to the end. SimulatorError when a wait has no recorded signal."""
        end = 0.0
        while self.heap:
            warp = heapq.heappop(self.heap)[2]
            self._advance(warp)
            end = max(end, warp.time)
        if self.blocked:
            (_, key), warps = next(iter(self.blocked.items()))
            raise SimulatorError(f"time model: {warps[0].name} waits for {key}, never signalled")
        end = max([end, *(max(sm.inbound.free, sm.outbound.free) for sm in self.sms)])
        count = len(self.sms)
        units = [sm.busy() for sm in self.sms]
        busy = {name: sum(unit[name] for unit in units) / count for name in units[0]}
        return Replayed(end, busy, self.waiting, self.spans)

    # --- warps -----------------------------------------------------------------------------------
    def _steps(self, warp: WarpTrace) -> Iterator[Segment | trace.Event]:
        """Segments and events of a warp in order; an instruction's own cost comes before it."""
        blocks = self.program.blocks
        for number, events in warp.blocks:
            start, stop = blocks[number].start, blocks[number].stop
            for event in events:
                if event.at >= start:
                    yield self._segment(start, event.at + 1)
                    start = event.at + 1
                yield event
            if start < stop:
                yield self._segment(start, stop)

    def _segment(self, start: int, stop: int) -> Segment:
        found = self._segments.get((start, stop))
        if found is None:
            found = make_segment(self.program.entry, start, stop, self.machine)
            self._segments[start, stop] = found
        return found

    def _push(self, warp: _Warp) -> None:
        self._serial += 1
        heapq.heappush(self.heap, (warp.time, self._serial, warp))

    def _advance(self, warp: _Warp) -> None:
        """Run a warp until it blocks, ends, or another one is due."""
        while True:
            if self.heap and self.heap[0][0] < warp.time:
                self._push(warp)
                return
            if warp.part:
                self._run_part(warp)
                continue
            step = next(warp.steps, None)
            if step is None:
                return
            if isinstance(step, Segment):
                self._start(warp, step)
            elif self._handlers[type(step)](warp, step):
                return

    def _start(self, warp: _Warp, segment: Segment) -> None:
        """Begin a segment when the registers it needs are there."""
        if warp.late:
            begin = warp.time
            for register in warp.late.keys() & segment.uses.keys():
                begin = max(begin, warp.late[register] - segment.uses[register])
            if begin > warp.time:
                self._waited(warp, "registers", begin)
            copies = {
                register: max(warp.late.get(origin, begin) for origin in origins)
                for register, origins in segment.copies.items()
            }
            warp.late = {r: t for r, t in (warp.late | copies).items() if t > begin}
        for register, offset in segment.results.items():
            warp.late[register] = warp.time + offset
        warp.segment, warp.part = segment, max(1, -(-segment.issue // QUANTUM))

    def _run_part(self, warp: _Warp) -> None:
        segment = warp.segment
        parts = max(1, -(-segment.issue // QUANTUM))
        now, core = warp.time, warp.core
        end = max(now + segment.length / parts, core.issue.take(now, segment.issue / parts))
        for name, cycles in segment.pipes.items():
            end = max(end, core.pipes[name].take(now, cycles / parts))
        warp.time = end
        warp.part -= 1

    def _waited(self, warp: _Warp, what: str, until: float) -> None:
        """A warp stands still until a time."""
        if until > warp.time:
            self.waiting[what] = self.waiting.get(what, 0.0) + until - warp.time
            self._span(warp, warp.name, f"wait: {what}", warp.time, until)
            warp.time = until

    def _span(self, warp: _Warp, track: str, name: str, start: float, stop: float) -> None:
        sm = self.placement[warp.cluster][warp.trace.cta]
        self.spans.append(Span(track, name, start, stop, sm))

    def _arrive_late(self, warp: _Warp, at: int, ready: float) -> None:
        """The results of instruction `at` come at a time."""
        entry = self.program.entry
        for register in targets_and_sources(entry.instructions[at], entry)[0]:
            warp.late[register] = ready

    # --- ordinary accesses -----------------------------------------------------------------------
    def _shared(self, warp: _Warp, event: trace.SharedAccess) -> None:
        done = warp.sm.port.access(warp.time, event.wavefronts)
        if event.write:
            self._waited(warp, "SMEM port", done - STORE_QUEUE)
        else:
            self._arrive_late(warp, event.at, done + self.machine.shared_latency)

    def _global(self, warp: _Warp, event: trace.GlobalAccess) -> None:
        if event.write:
            warp.sm.send(warp.time, event.size)
        else:
            start, latency = warp.time, self.machine.global_latency
            if "acquire" in self.program.entry.instructions[event.at].parts:
                # What it waits for is released when the peers' stores have left, as its own have.
                start, latency = max(start, warp.sm.outbound.free), self.machine.flag_latency
            self._arrive_late(warp, event.at, warp.sm.load(start, event.size, latency))

    # --- barriers --------------------------------------------------------------------------------
    def _contribute(self, cluster: int, key: Key, time: float, count: int = 1) -> None:
        left = self.signals[cluster]
        place = (cluster, key)
        self.completion[place] = max(self.completion.get(place, 0.0), time)
        left[key] -= count
        if left[key] == 0:
            for warp in self.blocked.pop(place, ()):
                self._wake(warp, key)
                self._push(warp)

    def _signal(self, warp: _Warp, event: trace.Signal) -> None:
        # Arrivals follow the stores of the same warp through the port.
        time = warp.time
        if event.key[0] == "mbarrier":
            time = max(time, warp.sm.port.free)
        self._contribute(warp.cluster, event.key, time, event.count)

    def _wait(self, warp: _Warp, event: trace.Wait) -> bool:
        """True while the warp has to stay."""
        if self.signals[warp.cluster].get(event.key, 0) > 0:
            self.blocked.setdefault((warp.cluster, event.key), []).append(warp)
            return True
        self._wake(warp, event.key)
        return False

    def _wake(self, warp: _Warp, key: Key) -> None:
        machine = self.machine
        latency = {
            "mbarrier": machine.barrier_latency,
            "bar": machine.named_barrier_latency,
            "cluster": machine.cluster_barrier_latency,
        }[key[0]]
        done = self.completion.get((warp.cluster, key), 0.0)
        self._waited(warp, _barrier_name(key), max(warp.time, done) + latency)

    # --- copies ----------------------------------------------------------------------------------
    def _bulk_load(self, warp: _Warp, event: trace.BulkLoad) -> None:
        issued = warp.sm.copies.take(warp.time, event.rows * self.machine.copy_issue)
        for rank, key in event.targets:
            sm = self.sms[self.placement[warp.cluster][rank]]
            if event.remote:
                done = sm.receive(issued, event.size)
            else:
                many = len(event.targets) > 1
                done = sm.fetch(issued, event.size, self.machine.memory_latency, multicast=many)
            self._contribute(warp.cluster, key, done)
        place = self.placement[warp.cluster][warp.trace.cta]
        self._span(warp, f"SM {place} TMA", f"load {event.size} B", issued, done)

    def _remote_store(self, warp: _Warp, event: trace.RemoteStore) -> None:
        # Not by the TMA unit: what bounds it is the way to the other SM, as of every instruction.
        for (rank, key), size in event.targets.items():
            sm = self.sms[self.placement[warp.cluster][rank]]
            self._contribute(warp.cluster, key, sm.receive(warp.time, size))

    def _bulk_store(self, warp: _Warp, event: trace.BulkStore) -> None:
        issued = warp.sm.copies.take(warp.time, event.rows * self.machine.copy_issue)
        done = warp.sm.send(issued, event.size)
        warp.bulk_groups[event.group] = max(warp.bulk_groups.get(event.group, 0.0), done)
        place = self.placement[warp.cluster][warp.trace.cta]
        self._span(warp, f"SM {place} TMA stores", f"store {event.size} B", issued, done)

    def _bulk_wait(self, warp: _Warp, event: trace.BulkWait) -> None:
        done = [t for group, t in warp.bulk_groups.items() if group <= event.group]
        self._waited(warp, "bulk stores", max(done, default=0.0))

    def _copy(self, warp: _Warp, event: trace.AsyncCopy) -> None:
        done = warp.sm.fetch(warp.time, event.size, self.machine.global_latency)
        warp.copies[event.number] = max(warp.copies.get(event.number - 1, 0.0), done)

    def _copy_arrive(self, warp: _Warp, event: trace.AsyncCopyArrive) -> None:
        done = max(warp.time, warp.copies.get(event.number, 0.0))
        self._contribute(warp.cluster, event.key, done, event.count)

    def _copy_wait(self, warp: _Warp, event: trace.AsyncCopyWait) -> None:
        self._waited(warp, "cp.async", warp.copies.get(event.number, 0.0))

    # --- tensor cores ----------------------------------------------------------------------------
    def _multiply(self, warp: _Warp, event: trace.Multiply) -> None:
        cycles, drain = self.machine.tcgen05_mma(event.ctas, event.m, event.n, event.a_in_tmem)
        rank = warp.trace.cta & ~(event.ctas - 1)
        places = self.placement[warp.cluster][rank : rank + event.ctas]
        done = max(self.sms[p].tensor.take(warp.time, cycles) for p in places)
        read = 32 * ((0 if event.a_in_tmem else event.m) + event.n) / event.ctas
        for place in places:
            self.mma_done[place] = done + drain
            self.sms[place].port.operand_reads(done, cycles, read)
            name = f"{event.ctas} CTA {event.m}x{event.n} {'TS' if event.a_in_tmem else 'SS'}"
            self._span(warp, f"SM {place} tensor pipe", name, done - cycles, done)

    def _tmem_copy(self, warp: _Warp, event: trace.TmemCopy) -> None:
        place = self.placement[warp.cluster][warp.trace.cta]
        cycles = event.size / self.machine.shared_bytes
        done = warp.sm.tensor.take(warp.time, cycles)
        warp.sm.port.operand_reads(done, cycles, event.size)
        self.mma_done[place] = max(self.mma_done[place], done)

    def _commit(self, warp: _Warp, event: trace.Commit) -> None:
        # The published latency of an MMA ends when the waiting thread goes on.
        place = self.placement[warp.cluster][warp.trace.cta & ~(event.ctas - 1)]
        done = max(warp.time, self.mma_done[place] - self.machine.barrier_latency)
        for key in event.keys:
            self._contribute(warp.cluster, key, done)

    def _wgmma(self, warp: _Warp, event: trace.WarpgroupMultiply) -> None:
        cycles = self.machine.wgmma(event.n, event.a_in_registers)
        done = warp.core.tensor.take(warp.time, cycles)
        warp.wgmmas[event.number] = done + self.machine.tensor_drain
        if warp.trace.number % SUBCORES == 0:
            read = 32 * ((0 if event.a_in_registers else 64) + event.n)
            warp.sm.port.operand_reads(done, cycles, read)
            place = self.placement[warp.cluster][warp.trace.cta]
            name = f"64x{event.n} {'RS' if event.a_in_registers else 'SS'}"
            self._span(warp, f"SM {place} tensor pipe", name, done - cycles, done)

    def _wgmma_wait(self, warp: _Warp, event: trace.WarpgroupWait) -> None:
        self._waited(warp, "wgmma", warp.wgmmas.get(event.number, 0.0))

    def _tmem(self, warp: _Warp, event: trace.TmemAccess) -> None:
        done = warp.core.tmem.take(warp.time, event.size / self.machine.tmem_bytes)
        warp.tmem[event.write] = done + self.machine.tmem_latency

    def _tmem_wait(self, warp: _Warp, event: trace.TmemWait) -> None:
        self._waited(warp, "TMEM", warp.tmem[event.write])


def _barrier_name(key: Key) -> str:
    """A barrier for people: phases of one mbarrier share a name."""
    if key[0] == "mbarrier":
        return f"mbarrier {key[1] & (1 << RANK_SHIFT) - 1:#x}"
    return f"barrier {key[2]}" if key[0] == "bar" else "cluster barrier"
