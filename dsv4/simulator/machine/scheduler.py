"""Scheduler of one launch: clusters become resident, warps take turns, asynchronous work completes.

Clusters start in grid order, each when the ones before it can make no more progress, so CTAs may
wait for each other through global memory as on hardware with enough SMs.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from dsv4.simulator.compile.program import Program, check_launchable
from dsv4.simulator.errors import Deadlock, Endless, KernelFault
from dsv4.simulator.machine.asynchronous import AsyncEngine
from dsv4.simulator.machine.deadlock import describe_deadlock
from dsv4.simulator.machine.memory import SYSTEM_SHARED_BYTES, Cluster, Cta, GlobalMemory
from dsv4.simulator.machine.observer import Observer
from dsv4.simulator.machine.occupancy import ctas_per_multiprocessor, registers_at_launch
from dsv4.simulator.machine.warp import Warp

SHARED_LIMIT = 227 * 1024
# Blocks a warp may run before the others get their turn. `eager` keeps warps roughly in step, as
# hardware does; the other schedules let one run as far ahead as synchronisation permits.
QUANTUM = {"eager": 8, "lazy": 1 << 16, "random": 1 << 16}
INSTRUCTIONS_PER_WARP = 20_000_000  # of one launch, before a warp counts as endless
PEER_IDLE_ROUNDS = 30_000  # milliseconds to wait for a flag that another process sets
IDLE_ROUNDS = 400  # rounds in which every warp only polls, before that counts as a deadlock


@dataclass
class LaunchConfig:
    """Configuration of a launch, as the host code gave it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    params: list[bytes]
    programmatic: bool = False  # may start before the launch before it is complete
    cooperative: bool = False  # all of its CTAs must fit the GPU at once
    non_portable: bool = False  # clusters of more than 8 CTAs are allowed
    workspace: int = 0  # address of what a cooperative launch gets for barriers of the grid
    peers: tuple[list[bytes], ...] = ()  # parameters of the same launch on further GPUs


@dataclass
class Launch:
    """One launch under way. Attributes warps and clusters share."""

    config: LaunchConfig
    program: Program
    memory: GlobalMemory
    schedule: str
    seed: int
    multiprocessors: int
    monitor: Observer | None = None
    tensor_maps: dict[bytes, object] = field(default_factory=dict)
    regions: dict[int, object] = field(default_factory=dict)  # instruction -> allocation it was in
    issued: dict[str, int] = field(default_factory=dict)
    atomics_lock: object = field(default_factory=threading.Lock)
    has_peers: bool = False  # other clusters run in other processes
    instructions_per_warp: int = INSTRUCTIONS_PER_WARP
    launch_before_done: bool = True  # or it has started early: griddepcontrol.wait waits
    ctas_let_go: int = 0  # that let the next launch start, or have exited

    def __post_init__(self) -> None:
        config = self.config
        check_launchable(
            self.program.entry, config.grid, config.block, config.cluster, config.non_portable
        )
        self.grid, self.block, self.cluster = config.grid, config.block, config.cluster
        self.shared, self.static_shared = config.shared, self.program.static_shared
        self.threads = config.block[0] * config.block[1] * config.block[2]
        self.warps = -(-self.threads // 32)
        self.padded_threads = 32 * self.warps
        self.registers_at_launch = registers_at_launch(self.program.entry, self.warps)
        self.cluster_size = config.cluster[0] * config.cluster[1] * config.cluster[2]
        if any(g % c for g, c in zip(config.grid, config.cluster)):
            raise KernelFault(f"grid {config.grid} is not a multiple of cluster {config.cluster}")
        if config.shared + self.static_shared > SHARED_LIMIT:
            raise KernelFault(
                f"{config.shared + self.static_shared} bytes of shared memory, "
                f"a CTA can have {SHARED_LIMIT}"
            )
        self.resident_clusters = self._resident_clusters()
        # By GPU: clusters are numbered on from one to the next.
        self.param_bytes = [self._param_bytes(params) for params in (config.params, *config.peers)]
        x, y, z = (g // c for g, c in zip(config.grid, config.cluster))
        self.clusters_per_gpu = x * y * z
        self.random = random.Random(self.seed)
        self.quantum = QUANTUM[self.schedule]
        self.hits_before = list(self.program.hits)
        self.turn = 0  # number of warps' turns so far
        # Clusters not started yet, last first; cluster launch control may cancel them.
        self.waiting: list[tuple[int, tuple[int, int, int]]] = []

    @property
    def ctas(self) -> int:
        """CTAs of all GPUs."""
        return self.clusters_per_gpu * self.cluster_size * len(self.param_bytes)

    def _param_bytes(self, params: list[bytes]) -> bytes:
        """The parameter space of one GPU."""
        raw = bytearray(self.program.entry.param_bytes)
        for (offset, size), value in zip(self.program.entry.params.values(), params):
            raw[offset : offset + size] = value
        return bytes(raw)

    def _resident_clusters(self) -> int:
        """Clusters that are on the GPUs at once, at most. Only a cooperative launch may count on
        more than one CTA for each multiprocessor.
        """
        ctas = self.multiprocessors
        if self.config.cooperative:
            used = self.config.shared + self.static_shared
            ctas *= ctas_per_multiprocessor(self.threads, used)
            wanted = self.grid[0] * self.grid[1] * self.grid[2]
            if wanted > ctas:
                raise KernelFault(
                    f"cooperative launch of {wanted} CTAs, {ctas} fit {self.multiprocessors} "
                    "multiprocessors at once (CUDA error 720: cooperative launch too large)"
                )
        return max(1, ctas // self.cluster_size) * (1 + len(self.config.peers))

    @property
    def lets_go(self) -> bool:
        """Every CTA has let the next launch start, or has exited."""
        return self.ctas_let_go == self.ctas

    def describe_endless(self, warp: Warp) -> str:
        """Which warp, and the block that this launch ran most."""
        program = self.program
        hits = [after - before for after, before in zip(program.hits, self.hits_before)]
        hottest = max(
            program.blocks, key=lambda block: hits[block.number] * (block.stop - block.start)
        )
        first, last = (program.entry.instructions[i] for i in (hottest.start, hottest.stop - 1))
        return (
            f"{warp.cta.name} warp {warp.number} ran {warp.executed:,} instructions, the limit is "
            f"{self.instructions_per_warp:,} (`instructions_per_warp`): most likely it never ends\n"
            f"  hottest block, run {hits[hottest.number]:,} times: from {first.where()}\n"
            f"  to {last.where()}"
        )

    def engine_for(self, cluster: Cluster) -> AsyncEngine:
        """The asynchronous engine of a new cluster."""
        return AsyncEngine(self.schedule, self.seed * 1_000_003 + cluster.number)

    def cluster_origins(self) -> list[tuple[int, int, int]]:
        """First CTA of every cluster, x fastest, GPU by GPU."""
        cx, cy, cz = self.cluster
        gx, gy, gz = self.grid
        origins = [
            (x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)
        ]
        return origins * len(self.param_bytes)

    def start(self, number: int, origin: tuple[int, int, int]) -> Resident:
        """Make a cluster resident."""
        cluster = Cluster(self, number)
        cx, cy, _ = self.cluster
        shared = SYSTEM_SHARED_BYTES + self.static_shared + self.shared
        for rank in range(self.cluster_size):
            index = (
                origin[0] + rank % cx,
                origin[1] + rank // cx % cy,
                origin[2] + rank // (cx * cy),
            )
            cluster.ctas.append(Cta(cluster, rank, index, shared))
        warps = [
            Warp(self.program, cta, i, self) for cta in cluster.ctas for i in range(self.warps)
        ]
        cluster.warps_total = len(warps)
        for warp in warps:
            warp.cta.warps.append(warp)
        if self.monitor is not None:
            self.monitor.start_cluster(cluster, warps)
        return Resident(cluster, warps)


class Resident:
    """A cluster with its warps."""

    def __init__(self, cluster: Cluster, warps: list[Warp]):
        self.cluster, self.warps, self.live = cluster, warps, list(warps)

    def round(self, launch: Launch) -> bool:
        """Give every live warp one turn; True if anything other than polling happened."""
        progressed = False
        engine = self.cluster.engine
        if launch.schedule != "eager":
            launch.random.shuffle(self.live)
        for warp in self.live:
            launch.turn += 1
            # May wake a warp that had its turn already: not a sign of a deadlock.
            if engine.maybe_step():
                progressed = True
            # A warp that ends right after a poll has done more than poll.
            if warp.run() and (warp.done or not warp.polling):
                progressed, warp.moved_in = True, launch.turn
            if warp.executed > launch.instructions_per_warp:
                raise Endless(launch.describe_endless(warp))
        if launch.monitor is not None:
            for warp in self.live:
                if warp.done:
                    launch.monitor.exited(warp)
        self.live = [warp for warp in self.live if not warp.done]
        return progressed

    def finish(self, launch: Launch) -> None:
        """All warps are done: complete what is outstanding and check what is left behind."""
        for warp in self.warps:
            outstanding = [*warp.bulk_groups, warp.bulk_open][warp.bulk_read :]
            stores = [store for group in outstanding for store in group]
            if stores and launch.monitor is not None:
                launch.monitor.exit_outstanding(warp, stores)
            for group in [*warp.bulk_groups, warp.bulk_open]:
                for store in group:
                    store.perform()
        self.cluster.engine.drain()
        for cta in self.cluster.ctas:
            for start, (columns, at) in sorted(cta.tmem_allocations.items()):
                where = launch.program.entry.instructions[at].where()
                raise KernelFault(
                    f"{cta.name} exits with TMEM columns {start}..{start + columns} allocated\n"
                    f"  at {where}"
                )
        for kind, count in self.cluster.engine.issued.items():
            launch.issued[kind] = launch.issued.get(kind, 0) + count
        launch.ctas_let_go += sum(not cta.let_go for cta in self.cluster.ctas)
        if launch.monitor is not None:
            launch.monitor.finish_cluster(self.cluster, self.warps)


class LaunchRun:
    """A launch under way: its clusters that wait, and those that are resident."""

    def __init__(self, launch: Launch, mine: list[tuple[int, tuple[int, int, int]]] | None = None):
        self.launch = launch
        self.waiting = list(enumerate(launch.cluster_origins())) if mine is None else list(mine)
        self.waiting.reverse()
        launch.waiting = self.waiting
        self.width = 1 if launch.schedule == "eager" else 2
        self.resident: list[Resident] = []

    @property
    def done(self) -> bool:
        """Every cluster has run to its end."""
        return not self.resident and not self.waiting

    def step(self) -> bool:
        """Give every live warp a turn; or, if none did anything, let one asynchronous operation
        complete or one more cluster start. False if there was nothing of this either."""
        while self.waiting and len(self.resident) < self.width:
            self._start()
        progressed = False
        for cluster in list(self.resident):
            if cluster.round(self.launch):
                progressed = True
            if not cluster.live:
                cluster.finish(self.launch)
                self.resident.remove(cluster)
                progressed = True
        if progressed or any(cluster.cluster.engine.step() for cluster in self.resident):
            return True
        if self.waiting and len(self.resident) < self.launch.resident_clusters:
            self._start()
            return True
        return False

    def _start(self) -> None:
        self.resident.append(self.launch.start(*self.waiting.pop()))

    def live(self) -> list[Warp]:
        """The warps of resident clusters that have not exited."""
        return [warp for cluster in self.resident for warp in cluster.live]


@np.errstate(all="ignore")  # overflow and NaN are results, not mishaps
def run_launch(launch: Launch, mine: list[tuple[int, tuple[int, int, int]]] | None = None) -> None:
    """Run every cluster (or those in `mine`) to completion. Raises Deadlock, KernelFault."""
    run, idle = LaunchRun(launch, mine), 0
    while not run.done:
        if run.step():
            idle = 0
            continue
        idle += 1
        polling = any(warp.polling for warp in run.live())
        if launch.has_peers and polling and idle <= PEER_IDLE_ROUNDS:
            time.sleep(0.001)
        elif not polling or idle > IDLE_ROUNDS:
            raise Deadlock(describe_deadlock(run.live()))
