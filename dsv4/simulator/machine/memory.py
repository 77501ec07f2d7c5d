"""Global memory, and what one CTA and one cluster hold: shared memory, TMEM, barriers."""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.mbarrier import MemoryBarrier

SHARED_BYTES = 228 * 1024  # per SM; a CTA may use 227 KB of it
SYSTEM_SHARED_BYTES = 1024  # reserved at the start of every CTA's window
TMEM_COLUMNS, TMEM_LANES = 512, 128
RANK_SHIFT = 24  # a shared::cluster address carries the CTA's rank from this bit on
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_WINDOW = 1 << 56  # generic addresses of shared memory start here
PARAM_WINDOW = 1 << 57
LOCAL_WINDOW = 1 << 58
CHUNK = np.dtype("V16")  # numpy moves such elements about ten times as fast as rows of 16 bytes
# What a lane accesses at once, by its bytes.
ELEMENT = {
    1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
    16: CHUNK, 32: np.dtype("V32"),
}  # fmt: skip
WORD, VECTOR = 4, 32  # bytes that the checker tells apart, and the most that a lane accesses
UNINITIALISED_BYTE = 0xCD
UNINITIALISED_TMEM = 0x7FFFDEAD  # a NaN


class Region:
    """One allocation: bytes [start, stop) of the host, viewable as any element type."""

    def __init__(self, start: int, size: int, name: str):
        self.start, self.stop, self.name = start, start + size, name
        self.size, self.base = size, np.uint64(start)
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
        self._views: dict[object, np.ndarray] = {}

    def view(self, dtype) -> np.ndarray:
        """All whole elements of `dtype`, from the start of the region."""
        found = self._views.get(dtype)
        if found is None:
            size = np.dtype(dtype).itemsize
            found = self.bytes[: len(self.bytes) // size * size].view(dtype)
            self._views[dtype] = found
        return found


class GlobalMemory:
    """The allocations a kernel may touch. Addresses are the host's own."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._starts: list[int] = []
        self._storages: list[tuple[int, int, str]] = []
        self.owners: list[object] = []

    def add_slice(
        self, start: int, size: int, storage: int, storage_size: int, name: str, owner: object
    ) -> None:
        """Register the part of an allocation that a kernel is given. It starts at a whole vector,
        as far as the allocation does, so that accesses of all lanes at once stay possible."""
        stop = min(-(-(start + size) // WORD) * WORD, storage + storage_size)
        start = max(start // VECTOR * VECTOR, storage)
        self.add(start, stop - start, name, owner)
        self._storages.append((storage, storage + storage_size, name))

    def add(self, start: int, size: int, name: str, owner: object = None) -> None:
        """Register an allocation; overlapping ones are merged. `owner` is kept alive."""
        self.owners.append(owner)
        stop = start + size
        overlapping = [r for r in self.regions if r.start <= stop and start <= r.stop]
        for region in overlapping:
            start, stop = min(start, region.start), max(stop, region.stop)
            name = region.name
            self.regions.remove(region)
        self.regions.append(Region(start, stop - start, name))
        self.regions.sort(key=lambda r: r.start)
        self._starts = [r.start for r in self.regions]

    def find(self, start: int, stop: int) -> Region:
        """The region that holds [start, stop). Raises KernelFault with the nearest allocation."""
        i = bisect.bisect_right(self._starts, start) - 1
        if i >= 0 and stop <= self.regions[i].stop:
            return self.regions[i]
        for begin, end, name in self._storages:
            if begin <= start and stop <= end:
                raise KernelFault(
                    f"global access [{start:#x}, {stop:#x}) is in the storage of {name}, "
                    f"but not in the slice of it that the kernel was given: byte {start - begin} "
                    f"of {end - begin}"
                )
        near = self.regions[max(i, 0)] if self.regions else None
        hint = (
            f"; nearest is {near.name} [{near.start:#x}, {near.stop:#x}), "
            f"offset {start - near.start}"
            if near
            else ""
        )
        raise KernelFault(
            f"global access [{start:#x}, {stop:#x}) is outside every argument tensor{hint}"
        )

    def read(self, start: int, size: int) -> np.ndarray:
        """A view of bytes [start, start + size)."""
        region = self.find(start, start + size)
        return region.bytes[start - region.start : start - region.start + size]


class Cta:
    """One CTA: shared memory, TMEM, named barriers, its place in grid and cluster."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int], shared: int):
        self.cluster, self.rank, self.index = cluster, rank, index
        self.base = rank << RANK_SHIFT
        # The limit is the launch's own: an access past it would hit another CTA's memory.
        self.shared_limit = shared
        self.s8 = np.full(SHARED_BYTES, UNINITIALISED_BYTE, np.uint8)
        self.views = {
            np.uint8: self.s8,
            np.uint16: self.s8.view(np.uint16),
            np.uint32: self.s8.view(np.uint32),
            np.uint64: self.s8.view(np.uint64),
        }
        self.s16, self.s32 = self.views[np.uint16], self.views[np.uint32]
        self.rows = self.s8.reshape(-1, 16)
        self.elements = {size: self.s8.view(dtype) for size, dtype in ELEMENT.items()}
        self.chunks = self.elements[16]
        self.tmem: np.ndarray | None = None
        self.tmem_owned = np.zeros(TMEM_COLUMNS, np.bool_)
        self.tmem_allocations: dict[int, tuple[int, int]] = {}  # columns, allocating instruction
        self.tmem_relinquished = False
        self.named: dict[int, NamedBarrier] = {}
        self.name = f"CTA {index}"
        self.warps: list = []
        # By quarter of the register file: registers of a thread that setmaxnreg gave up.
        self.spare_registers = [0, 0, 0, 0]
        self.let_go = False  # griddepcontrol.launch_dependents was executed
        self.products: dict[tuple[int, int], object] = {}  # wgmmas some warp has yet to issue
        # Of instructions that some warps of a warpgroup have yet to reach: (warpgroup, number) ->
        # (instruction, first warp, warps that have).
        self.wgmma_steps: dict[tuple[int, int], tuple[int, int, int]] = {}

    def tensor_memory(self) -> np.ndarray:
        """TMEM as [column, lane] of 32-bit words."""
        if self.tmem is None:
            self.tmem = np.full((TMEM_COLUMNS, TMEM_LANES), UNINITIALISED_TMEM, np.uint32)
        return self.tmem


class NamedBarrier:
    """A `bar`: threads arrived in this generation, the count expected, and the generation.

    `everyone` is True for a barrier of all threads of the CTA, which does not wait for those that
    have exited; `detached` are the threads that arrived without waiting; `completed_in` is the turn
    of the last completion.
    """

    __slots__ = (
        "arrived", "completed_in", "detached", "everyone", "expected", "generation", "reduction",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrived, self.expected, self.generation = 0, None, 0
        self.everyone, self.detached, self.completed_in = False, 0, 0
        self.reduction: list[int] = []

    def complete(self, turn: int) -> None:
        """Let the waiting threads pass."""
        self.arrived = self.detached = 0
        self.completed_in = turn
        self.generation += 1


class Cluster:
    """The CTAs of one cluster and what they share: mbarriers, the cluster barrier."""

    def __init__(self, launch, number: int):
        self.launch, self.number = launch, number
        self.gpu = number // launch.clusters_per_gpu
        self.params: bytes = launch.param_bytes[self.gpu]
        self.memory: GlobalMemory = launch.memory
        self.engine = launch.engine_for(self)
        self.ctas: list[Cta] = []
        self.barriers: dict[int, MemoryBarrier] = {}
        self.barrier_arrived, self.barrier_generation, self.barrier_completed_in = 0, 0, 0
        self.warps_total = 0
        self.state = None  # the checker's

    def barrier(self, address: int) -> MemoryBarrier:
        """The mbarrier at a shared::cluster address."""
        found = self.barriers.get(address)
        if found is None:
            raise KernelFault(
                f"mbarrier at CTA rank {address >> RANK_SHIFT}, shared offset "
                f"{address & OFFSET_MASK:#x} was never initialised"
            )
        return found

    def cta_at(self, address: int) -> Cta:
        """The CTA whose shared memory an address names."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise KernelFault(f"shared::cluster address {address:#x}: no CTA of rank {rank}")
        return self.ctas[rank]
