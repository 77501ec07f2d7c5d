"""Trace of a launch, in the order of each warp: the input of the time model.

A trace has no times. It names, for every warp, the basic blocks it ran and what it asked of the
units that work beside it; signals and waits carry keys, and a key is complete once as many signals
have arrived as were recorded. Replay therefore needs neither data nor barrier state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from dsv4.simulator.compile.program import Program
from dsv4.simulator.machine.scheduler import LaunchConfig

Key = Hashable  # ("mbarrier", address, phase), ("bar", CTA, number, generation), ("cluster", n)


@dataclass(slots=True)
class Event:
    """Something that instruction number `at` asked of a unit other than the warp's own pipes."""

    at: int


@dataclass(slots=True)
class SharedAccess(Event):
    """Ordinary access of shared memory; `wavefronts` are passes through its port."""

    wavefronts: int
    write: bool


@dataclass(slots=True)
class GlobalAccess(Event):
    """Ordinary access of global memory; bytes of the 32-byte sectors touched."""

    size: int
    write: bool


@dataclass(slots=True)
class Signal(Event):
    """`count` arrivals on a barrier."""

    key: Key
    count: int


@dataclass(slots=True)
class Wait(Event):
    """Wait until a key is complete."""

    key: Key


@dataclass(slots=True)
class BulkLoad(Event):
    """A copy of `size` bytes into the shared memory of each target, a CTA's rank and the key that
    its bytes signal; `remote` when it comes from shared memory of the cluster, else from global
    memory. `rows` that a gather takes from different places are requests of their own."""

    size: int
    targets: list[tuple[int, Key]]
    remote: bool
    rows: int = 1


@dataclass(slots=True)
class RemoteStore(Event):
    """st.async of a warp: bytes by target, a CTA's rank and the key that they signal."""

    targets: dict[tuple[int, Key], int]


@dataclass(slots=True)
class BulkStore(Event):
    """A copy of `size` bytes out of shared memory, part of bulk group number `group`; `rows` as of
    BulkLoad."""

    size: int
    group: int
    rows: int = 1


@dataclass(slots=True)
class BulkWait(Event):
    """Wait until the warp's bulk groups up to `group` have left shared memory."""

    group: int


@dataclass(slots=True)
class AsyncCopy(Event):
    """cp.async of `size` bytes in all, number `number` of its warp."""

    size: int
    number: int


@dataclass(slots=True)
class AsyncCopyArrive(Event):
    """Arrivals once the warp's cp.async up to `number` are complete."""

    key: Key
    count: int
    number: int


@dataclass(slots=True)
class AsyncCopyWait(Event):
    """Wait for the warp's cp.async up to `number`."""

    number: int


@dataclass(slots=True)
class Multiply(Event):
    """One tcgen05.mma of `ctas` CTAs, with D[m, n]."""

    ctas: int
    m: int
    n: int
    a_in_tmem: bool


@dataclass(slots=True)
class TmemCopy(Event):
    """tcgen05.cp of `size` bytes from shared memory, in order with the products."""

    size: int


@dataclass(slots=True)
class Commit(Event):
    """Signals once every earlier tcgen05.mma of the CTA (pair) is complete."""

    ctas: int
    keys: list[Key]


@dataclass(slots=True)
class WarpgroupMultiply(Event):
    """A warp's quarter of one wgmma, number `number` of its warp."""

    n: int
    a_in_registers: bool
    number: int


@dataclass(slots=True)
class WarpgroupWait(Event):
    """Wait for the warp's wgmmas up to `number`."""

    number: int


@dataclass(slots=True)
class TmemAccess(Event):
    """tcgen05.ld or .st of `size` bytes by one warp."""

    size: int
    write: bool


@dataclass(slots=True)
class TmemWait(Event):
    """tcgen05.wait::ld or ::st."""

    write: bool


@dataclass(slots=True)
class WarpTrace:
    """Blocks a warp ran, each with its events in order."""

    cta: int  # rank in the cluster
    number: int
    blocks: list[tuple[int, list[Event]]] = field(default_factory=list)


@dataclass
class ClusterTrace:
    """The warps of one cluster, and how many signals complete each key."""

    number: int
    warps: list[WarpTrace]
    signals: Counter = field(default_factory=Counter)
    loaded: int = 0  # bytes from global memory, counted where they arrive
    stored: int = 0
    sources: Counter = field(default_factory=Counter)  # (rank, where from) -> bytes of bulk copies

    def sources_of(self, rank: int) -> Counter:
        """Bytes that bulk copies bring to one CTA, by where they come from."""
        return Counter({where: n for (owner, where), n in self.sources.items() if owner == rank})


@dataclass
class LaunchTrace:
    """Traces of some clusters of a launch.

    Attributes:
        clusters: the recorded ones.
        footprint: bytes of the tensors that the launch could touch: no more distinct bytes can
            come from memory.
    """

    config: LaunchConfig
    program: Program
    shared_bytes: int
    clusters: list[ClusterTrace]
    footprint: int

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        x, y, z = self.config.grid
        return x * y * z

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        x, y, z = self.config.cluster
        return x * y * z

    def waves(self, side_by_side: int) -> list[tuple[int, list[ClusterTrace]]]:
        """Clusters of the full waves of so many, and of the last one: their number, and those
        recorded of them, or all recorded ones where none of theirs was."""
        count = self.ctas // self.cluster_size
        first_of_last = count - count % side_by_side
        early = [cluster for cluster in self.clusters if cluster.number < first_of_last]
        late = [cluster for cluster in self.clusters if cluster.number >= first_of_last]
        groups = ((first_of_last, early), (count - first_of_last, late))
        return [(n, recorded or self.clusters) for n, recorded in groups if n]

    def loaded(self, side_by_side: int) -> float:
        """Bytes that all clusters load from global memory, from those recorded of their waves."""
        return self._sum("loaded", side_by_side)

    def stored(self, side_by_side: int) -> float:
        """Bytes that all clusters store, from those recorded of their waves."""
        return self._sum("stored", side_by_side)

    @property
    def pair_fraction(self) -> float:
        """Bytes that neighbouring CTAs load, those that both load counted once, over all: from 1/2
        to 1, which it is where no neighbours were recorded."""
        wanted, landed = 0, 0
        for first, second in self._pairs():
            both = first + second
            landed += both.total()
            wanted += (first | second).total()
        return wanted / landed if landed else 1.0

    def _pairs(self) -> Iterator[tuple[Counter, Counter]]:
        """Bytes by source of CTAs that share a pair of SMs: an even one and the next."""
        if self.cluster_size > 1:
            for cluster in self.clusters:
                for rank in range(0, self.cluster_size, 2):
                    yield cluster.sources_of(rank), cluster.sources_of(rank + 1)
            return
        by_number = {cluster.number: cluster for cluster in self.clusters}
        for number, cluster in by_number.items():
            if number % 2 == 0 and number + 1 in by_number:
                yield cluster.sources_of(0), by_number[number + 1].sources_of(0)

    def _sum(self, name: str, side_by_side: int) -> float:
        return sum(
            count * sum(getattr(cluster, name) for cluster in recorded) / len(recorded)
            for count, recorded in self.waves(side_by_side)
        )
