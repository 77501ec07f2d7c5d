"""The happens-before checker: every access of a launch against the accesses before it.

Agents are warps and asynchronous engines (a warp's bulk stores, cp.async copies, TMEM loads and
stores, MMAs; a warpgroup's wgmmas; the copies that complete on one mbarrier). An engine's clock
counts its operations (or the barrier's phases); a warp learns it by waiting. Named barriers,
mbarriers and the cluster barrier carry clocks from arrivals to waits, flags in memory those of
releases to acquires. Ordinary writes before an asynchronous engine's access also need a proxy fence
on the way, and tcgen05 work of another warp its fences (only warned of: CuTeDSL's own pipelines
leave them out). Lanes of one warp: see lanes.py.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from dsv4.simulator.compile.program import Program
from dsv4.simulator.machine.memory import Cluster, Cta
from dsv4.simulator.machine.observer import Observer
from dsv4.simulator.races.cluster_state import ClusterState, lanes_of
from dsv4.simulator.races.copies import CopyRaces
from dsv4.simulator.races.global_memory import LAUNCH_BEFORE, GlobalRaces
from dsv4.simulator.races.shared_memory import ONE_LANE
from dsv4.simulator.races.tensor_memory import TensorRaces


class Monitor(CopyRaces, TensorRaces, Observer):
    """Receiver of every access and synchronisation of a launch, and its findings.

    Args:
        entry: the kernel.
        before: of the launch before, if this one may start while that one runs.
        undefined: addresses [start, stop) of allocations that hold nothing before the launches.
        guessed: addresses [start, stop) whose strong loads before the wait are guesses.
    """

    def __init__(
        self, entry, before: Monitor | None = None, undefined: tuple = (), guessed: tuple = ()
    ):
        super().__init__(entry)
        earlier = before.memory if before is not None else None
        self.memory = GlobalRaces(self, earlier, undefined, guessed)

    # --- life of a cluster -----------------------------------------------------------------------
    def start_cluster(self, cluster: Cluster, warps: list) -> None:
        """A cluster becomes resident."""
        cluster.state = ClusterState(cluster, warps)
        self.memory.prepare(cluster.launch)

    def finish_cluster(self, cluster: Cluster, warps: list) -> None:
        """What is left behind when every warp has exited."""
        for barrier in cluster.barriers.values():
            if barrier.transactions:
                self._leak(f"transaction count of {barrier} at exit", *barrier.places)
        for warp in warps:
            if warp.wgmma_pending:
                message = f"{warp.cta.name} warp {warp.number} exits with wgmma outstanding"
                self._leak(message, warp.wgmma_pending[0].at)
        for cta in cluster.ctas:
            self._check_register_changes(cta)
        cluster.state = None

    def _check_register_changes(self, cta: Cta) -> None:
        """The warps of a warpgroup must all execute setmaxnreg of the same counts. PTX wants the
        same instruction; NVIDIA's own kernels execute one in each role's branch."""
        for first in range(0, len(cta.warps), 4):
            leader, *others = cta.warps[first : first + 4]
            for other in others:
                for mine, its in zip_longest(leader.register_changes, other.register_changes):
                    if mine is None or its is None or mine.count != its.count:
                        said = [f"{x.count} registers" if x else "none" for x in (mine, its)]
                        message = (
                            f"{cta.name} warps {leader.number} and {other.number} are of one "
                            f"warpgroup and set {said[0]} and {said[1]}"
                        )
                        places = tuple(x.at for x in (mine, its) if x)
                        self.report("setmaxnreg of part of a warpgroup", message, places, places)
                        break

    def registers_never_written(self, program: Program) -> None:
        """Uses of registers that nothing writes, in blocks that have run. Compilers leave values
        undefined that is not needed: these are warnings."""
        for ins, register in program.unwritten_reads:
            block = next(b for b in program.blocks if b.start <= ins.index < b.stop)
            if program.hits[block.number]:
                message = f"{register} is used, and no instruction writes it"
                self.warn("register never written", message, ins.index)

    def exit_outstanding(self, w, stores: list) -> None:
        """A warp that issued bulk stores has exited without waiting for their reads."""
        self._leak(
            f"{w.cta.name} warp {w.number} exits with {len(stores)} bulk stores "
            "not waited for: their shared memory may be gone before it is read",
            *dict.fromkeys(store.at for store in stores),
        )

    def grid_waited(self, w, mask) -> None:
        """griddepcontrol.wait: the launch before is complete."""
        self.memory.waited = True
        clocks = w.cluster.state.clocks
        clocks.learn(w.agent, clocks.agent(LAUNCH_BEFORE), 1, lanes_of(w, mask))

    # --- global memory ---------------------------------------------------------------------------
    def global_access(
        self, w, active: np.ndarray, mask, size: int, write: bool, values=None
    ) -> None:
        """A load or store of global memory; `values` are those of a store."""
        self.memory.access(w, active, mask, size, write)
        if values is not None and len(active) > 1:
            self._within_store(w, active, mask, values)

    def atomic(self, w, space: str, address: np.ndarray, mask, size: int) -> None:
        """An atomic operation in any state space."""
        self.memory.atomic(w, space, address, mask, size)

    def map_fence(self, w, address: int | None, mask) -> None:
        """A release to the proxy of tensor maps, or an acquire of one map from it."""
        self.memory.map_fence(w, address, mask)

    def map_read(self, w, address: int, lane: int) -> None:
        """A copy reads its tensor map in global memory."""
        self.memory.map_read(w, address, ONE_LANE[lane])
