"""Plan of a warp-specialised kernel: warp roles, registers, shared memory, TMEM, barrier graph.

Plain Python: a plan is built, asserted and printed without a GPU and without the kernel compiler.
The kernel takes every size from it: `kit.storage` makes the shared-memory struct of a `SmemPlan`,
and the mbarriers are initialised with the arrival counts that a `BarrierGraph` derives from its
roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from dsv4.arch import SM_100A

WARP_THREADS = 32
WARPGROUP_WARPS = 4
# Shared memory and registers are those of sm_90a, too. Warp w has registers of quarter w % 4.
SMEM_CAPACITY = SM_100A.smem_per_cta
TMEM_COLUMNS = SM_100A.tmem_columns
REGISTER_FILE = SM_100A.registers_per_sm
MAX_REGISTERS = 255  # of a thread at launch
MBARRIER_BYTES = 8
GPC_SMS = 18  # SMs that a cluster is placed among; of an H200, in one of its GPCs fewer
MAX_ARRIVALS = (1 << 20) - 1  # of one phase of an mbarrier
DTYPE_BYTES = {
    "Float8E4M3FN": 1, "BFloat16": 2, "Float16": 2, "Float32": 4, "Int8": 1, "Int32": 4, "Int64": 8,
    "Uint8": 1
}  # fmt: skip


# ---- warps and registers -------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """Warps [first, first + count) of a CTA."""

    name: str
    first: int
    count: int

    @property
    def threads(self) -> int:
        return WARP_THREADS * self.count

    @property
    def first_thread(self) -> int:
        return WARP_THREADS * self.first

    @property
    def warps(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def is_warpgroup(self) -> bool:
        """Four warps from a multiple of four on: what wgmma, and the lanes of TMEM, ask for."""
        return self.count == WARPGROUP_WARPS and self.first % WARPGROUP_WARPS == 0

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"{self.name} {self.first}" + (f"-{last}" if last > self.first else "")


@dataclass(frozen=True)
class Warps:
    """Warp roles of a CTA in the order of their warps: `Warps.of(softmax=4, mma=1, load=1)`."""

    roles: tuple[Role, ...]

    @classmethod
    def of(cls, **counts: int) -> Warps:
        """Roles that take so many warps each, one behind the other."""
        roles: list[Role] = []
        for name, count in counts.items():
            assert count > 0, f"role {name} needs at least one warp, got {count}"
            roles.append(Role(name, sum(role.count for role in roles), count))
        return cls(tuple(roles))

    @property
    def threads(self) -> int:
        return sum(role.threads for role in self.roles)

    def __getitem__(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"no role {name}; there are {', '.join(role.name for role in self.roles)}")

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.roles))}: {self.threads} threads"


@dataclass(frozen=True)
class Registers:
    """Registers of a thread: as launched, or by role where roles change them (setmaxregister).

    `Registers.of(warps)` leaves what the launch gives; `Registers.of(warps, softmax=192, load=24)`
    names every role.
    """

    warps: Warps
    by_role: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, warps: Warps, **by_role: int) -> Registers:
        return cls(warps, tuple(by_role.items()))

    @property
    def at_launch(self) -> int:
        """Most that the launch can give every thread: registers come in eights, and each quarter
        of the SM serves every fourth warp.
        """
        warps = -(-self.warps.threads // (WARP_THREADS * WARPGROUP_WARPS))
        return min(MAX_REGISTERS, REGISTER_FILE // 4 // (WARP_THREADS * warps) // 8 * 8)

    def __getitem__(self, role: str) -> int:
        return dict(self.by_role)[self.warps[role].name]

    def __post_init__(self) -> None:
        if not self.by_role:
            return
        by_role = dict(self.by_role)
        names = [role.name for role in self.warps.roles]
        assert sorted(by_role) == sorted(names), f"registers: for {sorted(by_role)} of {names}"
        of_warp = [by_role[role.name] for role in self.warps.roles for _ in role.warps]
        for name, count in self.by_role:
            assert 24 <= count <= 256 and count % 8 == 0, (
                f"registers: {name} must have a multiple of 8 from 24 to 256, got {count}"
            )
        for first in range(0, len(of_warp), WARPGROUP_WARPS):
            group = of_warp[first : first + WARPGROUP_WARPS]
            assert len(set(group)) == 1, (
                f"registers: warps {first}-{first + len(group) - 1} are a warpgroup, got {group}"
            )
        # A CTA deals out what it was launched with: a role that asks for more waits for ever.
        groups = of_warp[::WARPGROUP_WARPS]
        used, launched = sum(groups), self.at_launch * len(groups)
        assert used <= launched, f"registers: {used} for a lane of each warpgroup, {launched} exist"

    def __str__(self) -> str:
        if not self.by_role:
            return f"at most {self.at_launch} a thread"
        return ", ".join(f"{name} {count}" for name, count in self.by_role)


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """Named array in shared memory; `dtype` is the name of a type of the kernel compiler."""

    name: str
    dtype: str
    count: int
    align: int = 0  # bytes; 0: that of the type

    @property
    def bytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]

    @property
    def alignment(self) -> int:
        return self.align or DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SmemPlan:
    """Shared memory of a CTA: buffers one behind the other, each as it is aligned."""

    buffers: tuple[Buffer, ...]
    capacity: int = SMEM_CAPACITY

    def __getitem__(self, name: str) -> Buffer:
        return self._find(name)[0]

    def offset(self, name: str) -> int:
        """Byte offset of a buffer."""
        return self._find(name)[1]

    @property
    def total_bytes(self) -> int:
        end = max((offset + buffer.bytes for buffer, offset in self._placed()), default=0)
        return _round_up(end, max((buffer.alignment for buffer in self.buffers), default=1))

    @property
    def free_bytes(self) -> int:
        """What is left: where a ring of stages is the last buffer, room for its stages."""
        return self.capacity - self.total_bytes

    def _find(self, name: str) -> tuple[Buffer, int]:
        for buffer, offset in self._placed():
            if buffer.name == name:
                return buffer, offset
        raise KeyError(f"no buffer {name}; there are {', '.join(b.name for b in self.buffers)}")

    def _placed(self) -> Iterator[tuple[Buffer, int]]:
        end = 0
        for buffer in self.buffers:
            offset = _round_up(end, buffer.alignment)
            yield buffer, offset
            end = offset + buffer.bytes

    def __post_init__(self) -> None:
        names = [buffer.name for buffer in self.buffers]
        assert len(set(names)) == len(names), f"SMEM: buffer names must differ, got {names}"
        assert self.total_bytes <= self.capacity, (
            f"SMEM: plan needs {self.total_bytes} bytes, a CTA has {self.capacity}"
        )

    def __str__(self) -> str:
        lines = [f"{self.total_bytes} of {self.capacity} bytes"]
        for buffer, offset in self._placed():
            array = f"{buffer.dtype} x {buffer.count}"
            lines.append(f"{offset:>9}  {buffer.name:<16} {array:<18} {buffer.bytes:>7} bytes")
        return "\n".join(lines)


@dataclass(frozen=True)
class TmemPlan:
    """Columns of Tensor Memory: regions side by side from column 0 on."""

    regions: tuple[tuple[str, int], ...]  # name, columns

    def column(self, name: str) -> int:
        """First column of a region."""
        first = 0
        for region, columns in self.regions:
            if region == name:
                return first
            first += columns
        raise KeyError(f"no region {name}; there are {', '.join(n for n, _ in self.regions)}")

    @property
    def used_columns(self) -> int:
        return sum(columns for _, columns in self.regions)

    @property
    def allocated_columns(self) -> int:
        """TMEM is allocated in powers of two, from 32 columns on."""
        return max(32, 1 << (self.used_columns - 1).bit_length())

    def __post_init__(self) -> None:
        assert self.allocated_columns <= TMEM_COLUMNS, (
            f"TMEM: {self.used_columns} columns used, {TMEM_COLUMNS} exist"
        )

    def __str__(self) -> str:
        regions = [f"{name} at {self.column(name)}" for name, _ in self.regions]
        allocated = f"{self.used_columns} of {self.allocated_columns} allocated columns"
        return f"{', '.join(regions)}: {allocated}"


# ---- barriers ------------------------------------------------------------------------------------


class Arrive(Enum):
    """Way in which a role arrives at an mbarrier."""

    THREAD = "threads"  # each
    WARP = "warps"  # one lane of each
    LANE = "lane"  # one
    TMA = "TMA"  # one arrival that expects the bytes of a copy
    MMA = "commit"  # tcgen05.commit: one arrival when the products before it are complete


@dataclass(frozen=True)
class Arrival:
    """Arrivals of one role in one phase of an mbarrier."""

    role: str
    by: Arrive
    warps: int | None = None  # of the role that take part; None: all
    ctas: int = 1  # of the cluster that arrive at the same barrier
    factor: str | None = None  # name of a factor that is known at run time only

    def count(self, warps: Warps, lanes_per_warp: int, factors: dict):
        """Number of arrivals; a factor of the kernel's integer type makes it one of these."""
        role = warps[self.role]
        arriving = role.count if self.warps is None else self.warps
        assert 0 < arriving <= role.count, (
            f"barriers: {arriving} warps of {self.role} arrive, it has {role.count}"
        )
        of_warp = {Arrive.THREAD: WARP_THREADS, Arrive.WARP: lanes_per_warp}
        count = self.ctas * (arriving * of_warp[self.by] if self.by in of_warp else 1)
        return count if self.factor is None else count * factors[self.factor]

    def __str__(self) -> str:
        return f"{self.role} ({self.by.value})"


@dataclass(frozen=True)
class Edge:
    """Producer -> consumer edge of `stages` buffers, each with a full and an empty mbarrier.

    A signal has no empty mbarriers: another edge keeps its producer from running ahead.
    """

    name: str
    payload: str
    producers: tuple[Arrival, ...]
    consumers: tuple[Arrival, ...]
    stages: int = 1
    tx_bytes: int = 0  # that TMA adds to a full barrier; where they vary, 0
    is_signal: bool = False

    @property
    def mbarriers(self) -> int:
        return self.stages if self.is_signal else 2 * self.stages

    @property
    def buffer(self) -> Buffer:
        """Storage of the mbarriers: the full ones, then the empty ones."""
        return Buffer(f"{self.name}_barriers", "Int64", self.mbarriers)

    @property
    def split_buffers(self) -> tuple[Buffer, ...]:
        """Storage of the mbarriers in two arrays, as `kit.mbarrier` addresses them."""
        sides = ("full",) if self.is_signal else ("full", "empty")
        return tuple(Buffer(f"{self.name}_{side}", "Int64", self.stages) for side in sides)


@dataclass(frozen=True)
class BarrierGraph:
    """Every mbarrier of a kernel that orders its roles, with the arrivals that each phase takes."""

    warps: Warps
    edges: tuple[Edge, ...]
    # Lanes that arrive for their warp after a warp sync: a race checker that follows every thread
    # by itself needs all 32.
    lanes_per_warp: int = 1

    def __getitem__(self, name: str) -> Edge:
        for edge in self.edges:
            if edge.name == name:
                return edge
        raise KeyError(f"no edge {name}; there are {', '.join(edge.name for edge in self.edges)}")

    def full_arrivals(self, name: str, **factors):
        """Arrivals that complete a full barrier; runtime factors by name."""
        return self._count(self[name].producers, factors)

    def empty_arrivals(self, name: str, **factors):
        """Arrivals that complete an empty barrier; runtime factors by name."""
        assert not self[name].is_signal, f"barriers: {name} is a signal, it is never empty"
        return self._count(self[name].consumers, factors)

    def initial_counts(self, name: str, **factors) -> Iterator[tuple[int, object]]:
        """(index in the edge's storage, arrivals) of each of its mbarriers, stage by stage."""
        edge = self[name]
        for stage in range(edge.stages):
            yield stage, self.full_arrivals(name, **factors)
            if not edge.is_signal:
                yield edge.stages + stage, self.empty_arrivals(name, **factors)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Storage of all mbarriers, one buffer an edge."""
        return tuple(edge.buffer for edge in self.edges)

    @property
    def split_buffers(self) -> tuple[Buffer, ...]:
        """Storage of all mbarriers, full and empty ones of an edge in arrays of their own."""
        return tuple(buffer for edge in self.edges for buffer in edge.split_buffers)

    def _count(self, arrivals: tuple[Arrival, ...], factors: dict):
        counts = [a.count(self.warps, self.lanes_per_warp, factors) for a in arrivals]
        total = counts[0]
        for count in counts[1:]:
            total = total + count
        return total

    def _symbolic_count(self, arrivals: tuple[Arrival, ...]) -> str:
        """Arrivals with runtime factors by name."""
        factors = {a.factor: 1 for a in arrivals if a.factor is not None}
        terms = []
        for arrival in arrivals:
            count = arrival.count(self.warps, self.lanes_per_warp, factors)
            terms.append(f"{count}" if arrival.factor is None else f"{count} x {arrival.factor}")
        known = sum(int(term) for term in terms if term.isdigit())
        return " + ".join(([str(known)] if known else []) + [t for t in terms if "x" in t])

    def __post_init__(self) -> None:
        names = [edge.name for edge in self.edges]
        assert len(set(names)) == len(names), f"barriers: edge names must differ, got {names}"
        for edge in self.edges:
            assert edge.stages > 0, f"barriers: {edge.name} has {edge.stages} stages"
            assert edge.producers and edge.consumers, f"barriers: {edge.name} has an open end"
            by_tma = any(arrival.by is Arrive.TMA for arrival in edge.producers)
            assert by_tma or not edge.tx_bytes, f"barriers: nothing adds bytes to {edge.name}"
            for arrival in (*edge.producers, *edge.consumers):
                factors = {arrival.factor: 1}
                count = arrival.count(self.warps, self.lanes_per_warp, factors)
                assert count <= MAX_ARRIVALS, f"barriers: {edge.name} counts to {count}"

    def __str__(self) -> str:
        rows = [("edge", "stages", "producer -> consumer", "full", "empty", "bytes", "payload")]
        for edge in self.edges:
            ends = [" + ".join(map(str, side)) for side in (edge.producers, edge.consumers)]
            empty = "-" if edge.is_signal else self._symbolic_count(edge.consumers)
            rows.append((
                edge.name, str(edge.stages), " -> ".join(ends),
                self._symbolic_count(edge.producers), empty, str(edge.tx_bytes or "-"),
                edge.payload,
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        return "\n".join(
            "  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[-1]])
            for row in rows
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
