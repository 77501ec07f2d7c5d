"""Recording a trace: a simulation whose monitor writes down what each warp does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from dsv4.simulator.api import Simulation
from dsv4.simulator.compile.codegen import BLOCKED
from dsv4.simulator.compile.program import Program
from dsv4.simulator.instructions.mbarrier import mbarrier_test
from dsv4.simulator.instructions.operands.tensor_core import Multiplication
from dsv4.simulator.machine.memory import Cluster, Cta, GlobalMemory
from dsv4.simulator.machine.observer import Observer
from dsv4.simulator.machine.scheduler import Launch, run_launch
from dsv4.simulator.timing import trace
from dsv4.simulator.timing.trace import ClusterTrace, Key, LaunchTrace, WarpTrace

SECTOR = 32  # bytes of global memory that travel together
CELL = 4  # bytes of a cell of a copy's source
Choose = Callable[[int], Sequence[int]]  # number of clusters -> those to record


def record(
    simulation: Simulation,
    arguments: Sequence,
    keywords: dict,
    choose: Choose,
    buffers: Sequence[torch.Tensor] = (),
) -> list[LaunchTrace]:
    """Run a host function and record some clusters of each of its launches.

    Args:
        simulation: from `Simulation.of_compiled`; its compiled blocks are reused.
        arguments, keywords: of the host function; CPU tensors. Clusters that are not recorded do
            not run, so outputs are incomplete.
        choose: which clusters of a launch with n of them to record. They must not wait for others.
        buffers: further tensors that the kernels may touch.
    """
    tensors = [x for x in (*arguments, *keywords.values()) if isinstance(x, torch.Tensor)]
    tensors += buffers
    memory = GlobalMemory()
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            memory.add(storage.data_ptr(), storage.nbytes(), f"tensor {i}", tensor)
    footprint = sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())
    traces = []
    for config in simulation.host.run(list(arguments), keywords):
        program = simulation.program(config.kernel)
        for name, (_, data) in simulation.variables.items():
            memory.add(data.ctypes.data, data.nbytes, f"variable {name}", data)
        recorder = Recorder()
        launch = Launch(config, program, memory, "eager", 0, simulation.multiprocessors, recorder)
        origins = launch.cluster_origins()
        # Clusters that did not run leave garbage for the others: only its arithmetic is odd.
        with _observed(program, recorder), np.errstate(all="ignore"):
            run_launch(launch, [(i, origins[i]) for i in choose(len(origins))])
        size = config.shared + program.static_shared
        traces.append(LaunchTrace(config, program, size, recorder.clusters, footprint))
    return traces


@contextmanager
def _observed(program: Program, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of every block that `program` completes, and let each first poll of a
    barrier fail: a kernel then takes its waiting path, and the trace says where it must wait."""
    full, masked, namespace = program.full, program.masked, program.namespace
    program.full, program.masked = (_ObservedTable(table, recorder) for table in (full, masked))
    namespace["mbarrier_test"] = recorder.poll
    try:
        yield
    finally:
        for table, observed in ((full, program.full), (masked, program.masked)):
            table[:] = observed.functions
        program.full, program.masked = full, masked
        namespace["mbarrier_test"] = mbarrier_test


class _ObservedTable(list):
    """Block functions that report to a recorder; `functions` are the plain ones."""

    def __init__(self, functions: list[Callable], recorder: Recorder):
        self.functions, self.recorder = list(functions), recorder
        super().__init__(self._observed(i, f) for i, f in enumerate(functions))

    def __setitem__(self, number: int, function: Callable) -> None:
        """A block has been compiled."""
        self.functions[number] = function
        super().__setitem__(number, self._observed(number, function))

    def _observed(self, number: int, function: Callable) -> Callable:
        completed = self.recorder.completed

        def observed(w, R):
            following = function(w, R)
            if following != BLOCKED:
                completed(w, number)
            return following

        return observed


@lru_cache(maxsize=4096)
def _wavefronts(pattern: bytes, size: int) -> int:
    """Passes that a warp's access of `size` bytes per lane makes through 32 banks of 4 bytes."""
    offsets = np.frombuffer(pattern, np.int64)
    group = max(1, min(32, 128 // max(size, 4)))  # lanes served together
    total = 0
    for first in range(0, len(offsets), group):
        part = offsets[first : first + group, None] // 4 + np.arange(max(1, size // 4))
        banks = np.unique(part) % 32
        total += int(np.bincount(banks).max())
    return total


def _rows(parts: tuple[str, ...]) -> int:
    """Places of global memory that a bulk copy goes to, each a request of its own."""
    return 4 if "tile::gather4" in parts or "tile::scatter4" in parts else 1


def _no_time(*_, **__) -> None:
    """A hook that leaves no trace."""


class Recorder(Observer):
    """Recorder of what the race checker receives, as a trace.

    Under the eager schedule an asynchronous operation is complete when it has been issued, so
    the phase of a barrier that it signals is the one at issue.
    """

    # A completion is in the signals of its issue; a fence costs what its instruction does.
    exited = exit_outstanding = grid_waited = _no_time
    bulk_load_done = bulk_written = cluster_copy = commit_done = _no_time
    barrier_init = barrier_inval = fence = map_fence = map_read = warp_sync = tmem_free = _no_time
    report = warn = _no_time

    def __init__(self) -> None:
        self.clusters: list[ClusterTrace] = []
        self._warps: dict[object, WarpTrace] = {}
        self._pending: dict[object, list[trace.Event]] = {}
        self._polled: set[tuple] = set()
        self._counts: dict[tuple, int] = {}

    # --- life of a cluster -----------------------------------------------------------------------
    def start_cluster(self, cluster: Cluster, warps: list) -> None:
        for warp in warps:
            self._warps[warp] = WarpTrace(warp.cta.rank, warp.number)
            self._pending[warp] = []
        cluster.state = ClusterTrace(cluster.number, [self._warps[w] for w in warps])
        self.clusters.append(cluster.state)

    def finish_cluster(self, cluster: Cluster, warps: list) -> None:
        cluster.state = None

    def completed(self, w, number: int) -> None:
        """A warp has completed block `number`."""
        self._warps[w].blocks.append((number, self._pending[w]))
        self._pending[w] = []

    def _add(self, w, event: trace.Event) -> None:
        self._pending[w].append(event)

    def _count(self, kind: str, w) -> int:
        key = (kind, w)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    # --- barriers --------------------------------------------------------------------------------
    def _signal(self, w, key: Key, count: int = 1) -> None:
        w.cluster.state.signals[key] += count
        events = self._pending[w]
        last = events[-1] if events else None
        if isinstance(last, trace.Signal) and last.key == key and last.at == w.at:
            last.count += count
        else:
            events.append(trace.Signal(w.at, key, count))

    def release(self, w, key: Key, mask=None) -> None:
        self._signal(w, key)

    def acquire(self, w, key: Key, mask=None) -> None:
        self._add(w, trace.Wait(w.at, key))

    def cluster_arrive(self, w, generation: int, mask) -> None:
        self._signal(w, ("cluster", generation))

    def cluster_wait(self, w, generation: int, mask) -> None:
        self._add(w, trace.Wait(w.at, ("cluster", generation)))

    def release_barrier(self, w, barrier, mask=None) -> None:
        self._signal(w, ("mbarrier", barrier.address, barrier.phase))

    def acquire_barrier(self, w, barrier, mask=None) -> None:
        self._add(w, trace.Wait(w.at, ("mbarrier", barrier.address, barrier.phase - 1)))

    def poll(self, w, address: np.ndarray, parity: np.ndarray, mask) -> np.ndarray:
        """mbarrier.try_wait without a suspend time: the first poll of a phase fails."""
        if mask.any():
            lane = int(mask.argmax())
            barrier = w.cluster.barrier(int(address[lane]))
            passed = barrier.passed(int(parity[lane]))
            key = (w, barrier.address, barrier.phase - passed)
            if key not in self._polled:
                self._polled.add(key)
                w.polling, w.waiting = True, str(barrier)
                return np.zeros(32, np.bool_)
        return mbarrier_test(w, address, parity, mask)

    # --- copies ----------------------------------------------------------------------------------
    def bulk_load(self, w, receivers, offsets: np.ndarray, lane=None, source=None) -> None:
        size = 16 * len(offsets)
        targets = []
        for cta, address in receivers:
            key = ("mbarrier", address, w.cluster.barrier(address).phase)
            w.cluster.state.signals[key] += 1
            targets.append((cta.rank, key))
        parts = self._instruction(w).parts
        remote = "global" not in parts  # from another CTA's shared memory
        if not remote:
            address, cells = source
            # Padding of elements and what lies outside a tensor are not fetched.
            size = min(size, CELL * len(cells))
            w.cluster.state.loaded += size * len(targets)
            place = (address, len(cells))
            w.cluster.state.sources.update({(rank, place): size for rank, _ in targets})
        self._add(w, trace.BulkLoad(w.at, size, targets, remote, _rows(parts)))

    def store_async(
        self, w, cta: Cta, barrier, offsets: np.ndarray, size: int, lanes: np.ndarray
    ) -> list:
        """The part that goes to one CTA of what the warp stores at once."""
        events = self._pending[w]
        last = events[-1] if events else None
        if not isinstance(last, trace.RemoteStore) or last.at != w.at:
            last = trace.RemoteStore(w.at, {})
            events.append(last)
        target = cta.rank, ("mbarrier", barrier.address, barrier.phase)
        if target not in last.targets:
            w.cluster.state.signals[target[1]] += 1
        last.targets[target] = last.targets.get(target, 0) + size * len(lanes)
        return [None] * len(lanes)

    def bulk_store(self, w, cta: Cta, offsets: np.ndarray, lane=None, target=None, op=None) -> None:
        size = 16 * len(offsets)
        w.cluster.state.stored += size
        group = self._counts.get(("bulk groups", w), 0)
        self._add(w, trace.BulkStore(w.at, size, group, _rows(self._instruction(w).parts)))

    def bulk_committed(self, w) -> None:
        self._count("bulk groups", w)

    def bulk_waited(self, w, mask=None) -> None:
        self._add(w, trace.BulkWait(w.at, self._count("bulk waits", w) - 1))

    def copy_issue(self, w, moves, size: int) -> int:
        number = self._count("cp.async", w)
        loaded = sum(wanted for *_, wanted in moves)
        w.cluster.state.loaded += loaded
        self._add(w, trace.AsyncCopy(w.at, loaded, number))
        return number

    def copy_waited(self, w, clock: int) -> None:
        self._add(w, trace.AsyncCopyWait(w.at, clock))

    def snapshot_copies(self, w) -> tuple:
        return w, self._counts.get(("cp.async", w), 0)

    def release_snapshot(self, snapshot, barrier) -> None:
        w, number = snapshot
        key = ("mbarrier", barrier.address, barrier.phase)
        w.cluster.state.signals[key] += 1
        events = self._pending[w]
        last = events[-1] if events else None
        if isinstance(last, trace.AsyncCopyArrive) and (last.key, last.number) == (key, number):
            last.count += 1
        else:
            events.append(trace.AsyncCopyArrive(w.at, key, 1, number))

    # --- tensor cores ----------------------------------------------------------------------------
    def tmem_access(self, w, cta: Cta, columns, lanes, write: bool) -> None:
        size = 4 * np.broadcast(columns, lanes).size
        self._add(w, trace.TmemAccess(w.at, size, write))

    def tmem_waited(self, w, kind: str) -> None:
        self._add(w, trace.TmemWait(w.at, kind == "st"))

    def tmem_used(self, w) -> None:
        self._add(w, trace.TmemWait(w.at, False))

    def multiply(self, w, cta: Cta, product: Multiplication, lane=None) -> None:
        form = product.form
        event = trace.Multiply(w.at, product.group, form.m, form.n, product.a_in_tmem)
        self._add(w, event)

    def tmem_copy(self, w, cta: Cta, index, column: int, columns: int, lanes, lane=None) -> None:
        self._add(w, trace.TmemCopy(w.at, 4 * columns * len(lanes)))

    def commit(self, w, barriers: list) -> None:
        keys = [("mbarrier", barrier.address, barrier.phase) for barrier in barriers]
        w.cluster.state.signals.update(keys)
        ctas = 2 if "cta_group::2" in self._instruction(w).parts else 1
        self._add(w, trace.Commit(w.at, ctas, keys))

    def wgmma(self, w, form, a, b: int, majors) -> None:
        event = trace.WarpgroupMultiply(w.at, form[0], isinstance(a, tuple), w.wgmma_issued)
        self._add(w, event)

    def wgmma_waited(self, w, clock: int) -> None:
        self._add(w, trace.WarpgroupWait(w.at, clock))

    @staticmethod
    def _instruction(w):
        return w.program.entry.instructions[w.at]

    # --- ordinary accesses -----------------------------------------------------------------------
    def shared(self, w, cta: Cta, offsets, mask, size: int, write: bool, values=None) -> None:
        places = np.asarray(offsets, np.int64) & 0x1FFFF
        self._add(w, trace.SharedAccess(w.at, _wavefronts(places.tobytes(), size), write))

    def global_access(
        self, w, active: np.ndarray, mask, size: int, write: bool, values=None
    ) -> None:
        sectors = len(np.unique(active // np.uint64(SECTOR))) * max(1, size // SECTOR)
        if write:
            w.cluster.state.stored += SECTOR * sectors
        else:
            w.cluster.state.loaded += SECTOR * sectors
        self._add(w, trace.GlobalAccess(w.at, SECTOR * sectors, write))

    def atomic(self, w, space: str, address: np.ndarray, mask, size: int) -> None:
        self._add(w, trace.GlobalAccess(w.at, SECTOR * int(np.count_nonzero(mask)), True))
