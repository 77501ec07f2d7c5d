"""Observer of a launch: the interface of the race checker and of the time recorder.

`w` is the warp that acts, `mask` the lanes of it that take part (None: the warp acts as one),
`lane` the one that issued an asynchronous operation. Offsets are bytes of a CTA's shared memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from dsv4.simulator.machine.memory import Cluster, Cta


class Observer(ABC):
    """Every hook is abstract, so that a new one is a decision of each implementation."""

    # --- life of a cluster -----------------------------------------------------------------------
    @abstractmethod
    def start_cluster(self, cluster: Cluster, warps: list) -> None:
        """A cluster becomes resident; `cluster.state` is the observer's own."""

    @abstractmethod
    def finish_cluster(self, cluster: Cluster, warps: list) -> None:
        """Every warp has exited, everything asynchronous is complete."""

    @abstractmethod
    def exited(self, w) -> None:
        """A warp has exited."""

    @abstractmethod
    def exit_outstanding(self, w, stores: list) -> None:
        """A warp that issued bulk stores has exited without waiting for their reads."""

    @abstractmethod
    def grid_waited(self, w, mask) -> None:
        """griddepcontrol.wait: the launch before is complete."""

    # --- ordinary accesses -----------------------------------------------------------------------
    @abstractmethod
    def shared(self, w, cta: Cta, offsets, mask, size: int, write: bool, values=None) -> None:
        """A load or store of `size` bytes per lane; `values` are those of a store."""

    @abstractmethod
    def global_access(
        self, w, active: np.ndarray, mask, size: int, write: bool, values=None
    ) -> None:
        """A load or store of `size` bytes at each of the `active` addresses."""

    @abstractmethod
    def atomic(self, w, space: str, address: np.ndarray, mask, size: int) -> None:
        """An atomic operation in any state space."""

    # --- barriers and fences ---------------------------------------------------------------------
    @abstractmethod
    def release(self, w, key: tuple, mask=None) -> None:
        """Arrival at a named barrier of the CTA; `key` is one use of it."""

    @abstractmethod
    def acquire(self, w, key: tuple, mask=None) -> None:
        """A warp leaves a named barrier."""

    @abstractmethod
    def cluster_arrive(self, w, generation: int, mask) -> None:
        """barrier.cluster.arrive."""

    @abstractmethod
    def cluster_wait(self, w, generation: int, mask) -> None:
        """barrier.cluster.wait has ended."""

    @abstractmethod
    def barrier_init(self, w, address: int) -> None:
        """mbarrier.init."""

    @abstractmethod
    def barrier_inval(self, w, address: int) -> None:
        """mbarrier.inval."""

    @abstractmethod
    def release_barrier(self, w, barrier, mask=None) -> None:
        """Arrival at an mbarrier."""

    @abstractmethod
    def acquire_barrier(self, w, barrier, mask=None) -> None:
        """The wait for the last phase of an mbarrier has ended."""

    @abstractmethod
    def warp_sync(self, w) -> None:
        """bar.warp.sync."""

    @abstractmethod
    def fence(self, w, opcode: str, mask=None) -> None:
        """A fence of any kind."""

    @abstractmethod
    def map_fence(self, w, address: int | None, mask) -> None:
        """A fence between generic accesses and copies' reads of tensor maps: an acquire of the map
        at an address, or a release (None), that of tensormap.cp_fenceproxy included."""

    # --- copies ----------------------------------------------------------------------------------
    @abstractmethod
    def map_read(self, w, address: int, lane: int) -> None:
        """A tensor copy reads its map, which lies in global memory."""

    @abstractmethod
    def bulk_load(self, w, receivers, offsets: np.ndarray, lane=None, source=None) -> object:
        """A copy of 16-byte chunks into shared memory at `offsets` of each receiver, a pair of a
        CTA and the address of the mbarrier it completes on. `source`: the footprint in global
        memory, none from a CTA's. Returns what `bulk_load_done` gets."""

    @abstractmethod
    def bulk_load_done(self, ticket, cta: Cta, barrier) -> None:
        """The copy into one CTA is complete."""

    @abstractmethod
    def cluster_copy(self, w, offsets: np.ndarray, address: int, lane: int) -> None:
        """The source of a copy to another CTA, which completes on the mbarrier at `address`."""

    @abstractmethod
    def store_async(
        self, w, cta: Cta, barrier, offsets: np.ndarray, size: int, lanes: np.ndarray
    ) -> list:
        """st.async of some lanes: `size` bytes at an offset each, which complete on one mbarrier.
        Returns a ticket a lane, as `bulk_load`."""

    @abstractmethod
    def bulk_store(self, w, cta: Cta, offsets: np.ndarray, lane=None, target=None, op=None) -> None:
        """A copy or reduction (`op`) out of shared memory, in the open bulk group."""

    @abstractmethod
    def bulk_committed(self, w) -> None:
        """cp.async.bulk.commit_group."""

    @abstractmethod
    def bulk_waited(self, w, mask=None) -> None:
        """One more bulk group has read its sources."""

    @abstractmethod
    def bulk_written(self, w, mask=None) -> None:
        """One more bulk group is complete."""

    @abstractmethod
    def copy_issue(self, w, moves, size: int) -> int:
        """cp.async: `moves` holds (lane, shared offset, address, bytes) of each. Returns its number
        among those of the warp."""

    @abstractmethod
    def copy_waited(self, w, clock: int) -> None:
        """cp.async.wait_group: copies up to a number are complete."""

    @abstractmethod
    def snapshot_copies(self, w) -> object:
        """cp.async.mbarrier.arrive: what `release_snapshot` gets once the copies are complete."""

    @abstractmethod
    def release_snapshot(self, snapshot, barrier) -> None:
        """The arrival of cp.async.mbarrier.arrive happens."""

    # --- tensor cores ----------------------------------------------------------------------------
    @abstractmethod
    def tmem_access(self, w, cta: Cta, columns, lanes, write: bool) -> None:
        """tcgen05.ld or .st, asynchronous until the matching wait."""

    @abstractmethod
    def tmem_waited(self, w, kind: str) -> None:
        """tcgen05.wait::ld or ::st."""

    @abstractmethod
    def tmem_used(self, w) -> None:
        """Registers of a tcgen05.ld are touched before the wait for it."""

    @abstractmethod
    def tmem_free(self, w, ctas: list[Cta], start: int, columns: int) -> None:
        """tcgen05.dealloc, in both CTAs of a pair."""

    @abstractmethod
    def tmem_copy(self, w, cta: Cta, index, column: int, columns: int, lanes, lane=None) -> None:
        """tcgen05.cp of the shared bytes at `index`, or tcgen05.shift."""

    @abstractmethod
    def multiply(self, w, cta: Cta, product, lane=None) -> None:
        """tcgen05.mma."""

    @abstractmethod
    def commit(self, w, barriers: list) -> object:
        """tcgen05.commit to some mbarriers. Returns what `commit_done` gets."""

    @abstractmethod
    def commit_done(self, ticket, barrier) -> None:
        """The commit arrives at one of its barriers."""

    @abstractmethod
    def wgmma(self, w, form, a, b: int, majors) -> None:
        """wgmma.mma_async; `a` is a tuple of registers or a descriptor."""

    @abstractmethod
    def wgmma_waited(self, w, clock: int) -> None:
        """wgmma.wait_group: products up to a number are complete."""

    # --- what instructions find by themselves ----------------------------------------------------
    @abstractmethod
    def report(self, kind: str, message: str, key: tuple, places: tuple[int, ...]) -> None:
        """A finding at some instructions; one of each kind and key is kept."""

    @abstractmethod
    def warn(self, kind: str, message: str, *places: int) -> None:
        """A finding of the tolerated class."""
