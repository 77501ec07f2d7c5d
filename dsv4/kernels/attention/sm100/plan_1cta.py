"""Budgets of the Blackwell attention kernel: tiles, warps, TMEM columns, shared memory, pipelines.

Everything here is plain Python: it can be built, asserted and printed without a GPU and without the
kernel compiler, and the kernel takes every size from it. `print(FmhaPlan(head_dim=512))` shows a
plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SMEM_LIMIT = 227 * 1024  # dynamic shared memory of one CTA on sm_100
TMEM_COLUMNS = 512
REGISTER_FILE = 64 * 1024
MAX_REGISTERS = 255
BF16_BYTES = 2
SUPPORTED_HEAD_DIMS = (64, 128, 256, 512)

ROWS = 64  # query heads of one CTA; 64 fp32 rows x 512 columns are half of TMEM
KEYS = 64  # keys of one tile


@dataclass(frozen=True)
class Tiling:
    """How one head_dim is cut: a KV tile of `KEYS` rows is `chunks` boxes of `chunk_dim`
    columns.
    """

    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim not in SUPPORTED_HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {SUPPORTED_HEAD_DIMS}, got {self.head_dim}")

    @property
    def chunk_dim(self) -> int:
        """Columns of one KV chunk = N of one PV instruction; tcgen05 takes at most 256."""
        return min(self.head_dim, 256)

    @property
    def chunks(self) -> int:
        return self.head_dim // self.chunk_dim


@dataclass(frozen=True)
class WarpSchedule:
    """Which warp plays which role."""

    softmax: tuple[int, ...] = (0, 1, 2, 3)  # a warpgroup: warp w reaches TMEM lanes 32w to 32w+31
    mma: int = 4
    load: int = 5

    @property
    def threads(self) -> int:
        return 32 * (len(self.softmax) + 2)

    @property
    def softmax_threads(self) -> int:
        return 32 * len(self.softmax)

    @property
    def register_limit(self) -> int:
        """Registers a thread may use: with 192 threads the file is no constraint and no role
        must give any up.
        """
        return min(MAX_REGISTERS, REGISTER_FILE // self.threads)

    def __post_init__(self) -> None:
        roles = (*self.softmax, self.mma, self.load)
        assert sorted(roles) == list(range(len(roles))), f"warp ids must be dense, got {roles}"
        assert len(self.softmax) == 4, f"TMEM needs 4 softmax warps, got {len(self.softmax)}"


@dataclass(frozen=True)
class TmemMap:
    """Columns of Tensor Memory.

    A 64-row accumulator fills 16 of every 32 lanes. Two accumulators therefore share columns, the
    second one 16 lanes higher: both chunks of O (head_dim 512) and both stages of S.
    """

    tiling: Tiling
    s_stages: int = 2

    @property
    def o_column(self) -> int:
        return 0

    @property
    def s_column(self) -> int:
        return self.o_column + self.tiling.chunk_dim

    @property
    def used_columns(self) -> int:
        return self.s_column + KEYS

    @property
    def allocated_columns(self) -> int:
        """TMEM is handed out in powers of two."""
        return 1 << (self.used_columns - 1).bit_length()

    def __post_init__(self) -> None:
        assert self.tiling.chunks <= 2, f"O has {self.tiling.chunks} chunks, lanes hold 2"
        assert self.s_stages == 2, f"S has {self.s_stages} stages, lanes hold 2"
        assert self.allocated_columns <= TMEM_COLUMNS, (
            f"TMEM: {self.used_columns} columns used, {TMEM_COLUMNS} exist"
        )


@dataclass(frozen=True)
class SmemPlan:
    """Bytes of shared memory. The output is staged over Q, which is dead by then."""

    tiling: Tiling
    p_stages: int = 2
    max_kv_stages: int = 8  # enough to cover the latency of memory at every head_dim

    @property
    def q_bytes(self) -> int:
        return ROWS * self.tiling.head_dim * BF16_BYTES

    @property
    def kv_stage_bytes(self) -> int:
        return KEYS * self.tiling.chunk_dim * BF16_BYTES

    @property
    def p_bytes(self) -> int:
        return self.p_stages * ROWS * KEYS * BF16_BYTES

    @property
    def q_elements(self) -> int:
        return self.q_bytes // BF16_BYTES

    @property
    def kv_elements(self) -> int:
        return self.kv_stages * self.kv_stage_bytes // BF16_BYTES

    @property
    def p_elements(self) -> int:
        return self.p_bytes // BF16_BYTES

    @property
    def barrier_bytes(self) -> int:
        """mbarriers and the TMEM address, padded to the 1024 bytes that swizzled buffers align
        to.
        """
        return 1024

    @property
    def kv_stages(self) -> int:
        """KV chunks in flight: what fits, at least two whole tiles."""
        room = SMEM_LIMIT - self.barrier_bytes - self.q_bytes - self.p_bytes
        return min(self.max_kv_stages, room // self.kv_stage_bytes)

    @property
    def total_bytes(self) -> int:
        kv_bytes = self.kv_stages * self.kv_stage_bytes
        return self.barrier_bytes + self.q_bytes + kv_bytes + self.p_bytes

    def __post_init__(self) -> None:
        assert self.kv_stages >= 2 * self.tiling.chunks, (
            f"SMEM: {self.kv_stages} KV chunks fit, two tiles need {2 * self.tiling.chunks}"
        )
        assert self.total_bytes <= SMEM_LIMIT, (
            f"SMEM: plan needs {self.total_bytes} bytes, a CTA has {SMEM_LIMIT}"
        )


@dataclass(frozen=True)
class Pipeline:
    """One producer -> consumer edge: `stages` buffers, each with a full and an empty mbarrier."""

    name: str
    stages: int
    producer: str
    consumer: str
    payload: str
    arrivals: int  # on the full barrier of a stage
    tx_bytes: int = 0  # bytes that TMA adds to it

    @property
    def mbarriers(self) -> int:
        return 2 * self.stages

    def __str__(self) -> str:
        return (
            f"pipeline {self.name:<3}{self.stages} stages, {self.producer} -> {self.consumer} "
            f"({self.payload}), {self.arrivals} arrivals, {self.tx_bytes} bytes"
        )


class Pipelines(NamedTuple):
    """The graph: every tile runs load -> mma -> softmax -> mma -> softmax."""

    q: Pipeline
    kv: Pipeline
    s: Pipeline
    p: Pipeline
    o: Pipeline


@dataclass(frozen=True)
class FmhaPlan:
    """Every budget of one compiled kernel."""

    head_dim: int

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.head_dim)

    @property
    def warps(self) -> WarpSchedule:
        return WarpSchedule()

    @property
    def tmem(self) -> TmemMap:
        return TmemMap(self.tiling)

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(self.tiling)

    @property
    def pipelines(self) -> Pipelines:
        smem, threads = self.smem, self.warps.softmax_threads
        return Pipelines(
            Pipeline("q", 1, "load", "mma", "Q", 1, smem.q_bytes),
            Pipeline("kv", smem.kv_stages, "load", "mma", "KV chunk", 1, smem.kv_stage_bytes),
            Pipeline("s", self.tmem.s_stages, "mma", "softmax", "S in TMEM", 1),
            Pipeline("p", smem.p_stages, "softmax", "mma", "P, and O is rescaled", threads),
            Pipeline("o", 1, "mma", "softmax", "O holds tile k", 1),
        )

    def __post_init__(self) -> None:
        barriers = 8 * sum(edge.mbarriers for edge in self.pipelines) + 4
        assert barriers <= self.smem.barrier_bytes, (
            f"SMEM: {barriers} bytes of barriers, {self.smem.barrier_bytes} reserved"
        )

    def __str__(self) -> str:
        smem, tmem, warps = self.smem, self.tmem, self.warps
        lines = [
            f"head_dim {self.head_dim}: {ROWS} heads x {KEYS} keys, "
            f"{self.tiling.chunks} chunks of {self.tiling.chunk_dim} columns",
            f"warps    softmax {warps.softmax}, mma {warps.mma}, load {warps.load}: "
            f"{warps.threads} threads, at most {warps.register_limit} registers each",
            f"TMEM     O at {tmem.o_column}, S at {tmem.s_column}: "
            f"{tmem.used_columns} of {tmem.allocated_columns} allocated columns",
            f"SMEM     Q {smem.q_bytes}, KV {smem.kv_stages} x {smem.kv_stage_bytes}, "
            f"P {smem.p_bytes}, barriers {smem.barrier_bytes}: "
            f"{smem.total_bytes} of {SMEM_LIMIT} bytes",
        ]
        return "\n".join(lines + [str(edge) for edge in self.pipelines])
