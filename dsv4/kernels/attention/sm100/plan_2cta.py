"""Budgets of a CTA pair of the Blackwell attention kernel: warps, TMEM, shared memory, pipelines.

Plain Python like `fmha_plan`: `print(PairPlan())` shows it without a GPU or the kernel compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsv4.kernels.attention.sm100.plan_1cta import (
    BF16_BYTES,
    KEYS,
    MAX_REGISTERS,
    REGISTER_FILE,
    ROWS,
    SMEM_LIMIT,
    TMEM_COLUMNS,
    Pipeline,
)

HEADS = 2 * ROWS  # of a pair; each CTA has the rows of 64
HEAD_DIM = 512
HALF_DIM = HEAD_DIM // 2  # columns of every key that one CTA holds
HALF_KEYS = KEYS // 2  # scores of a tile that one softmax thread weighs


@dataclass(frozen=True)
class PairWarps:
    """Which warp plays which role, in each CTA."""

    # Two warpgroups: warp w reaches TMEM lanes 32 (w % 4) to 32 (w % 4) + 31.
    softmax: tuple[int, ...] = (0, 1, 2, 3)
    query: tuple[int, ...] = (4, 5, 6, 7)
    mma: int = 8
    load: int = 9

    @property
    def threads(self) -> int:
        return 32 * (len(self.softmax) + len(self.query) + 2)

    @property
    def group_threads(self) -> int:
        """Threads of the softmax warps, and of the query warps."""
        return 32 * len(self.softmax)

    @property
    def register_limit(self) -> int:
        """Registers a thread may use: handed out in eights, by each quarter of the SM to every
        fourth warp.
        """
        warps = -(-self.threads // 128)
        return min(MAX_REGISTERS, REGISTER_FILE // 4 // (32 * warps) // 8 * 8)

    def __post_init__(self) -> None:
        roles = (*self.softmax, *self.query, self.mma, self.load)
        assert sorted(roles) == list(range(len(roles))), f"warp ids must be dense, got {roles}"
        for name in ("softmax", "query"):
            lanes = [warp % 4 for warp in getattr(self, name)]
            assert lanes == [0, 1, 2, 3], f"TMEM needs 4 {name} warps in order, got lanes {lanes}"


@dataclass(frozen=True)
class PairTmem:
    """Columns of Tensor Memory.

    A pair's accumulator of 128 rows puts 64 rows into each CTA and gives the upper half of its
    columns the upper 64 lanes. So 512 columns of O take 256, and lanes 0-63 and 64-127 of Q can
    hold different columns of the same heads.
    """

    s_stages: int = 2

    @property
    def o_column(self) -> int:
        return 0

    @property
    def q_column(self) -> int:
        return self.o_column + HALF_DIM

    @property
    def q_columns(self) -> int:
        """Two bf16 a column."""
        return HALF_DIM // 2

    @property
    def s_column(self) -> int:
        return self.q_column + self.q_columns

    @property
    def used_columns(self) -> int:
        return self.s_column + self.s_stages * KEYS

    @property
    def allocated_columns(self) -> int:
        """TMEM is handed out in powers of two."""
        return 1 << (self.used_columns - 1).bit_length()

    def __post_init__(self) -> None:
        assert self.allocated_columns <= TMEM_COLUMNS, (
            f"TMEM: {self.used_columns} columns used, {TMEM_COLUMNS} exist"
        )


@dataclass(frozen=True)
class PairSmemPlan:
    """Bytes of shared memory of each CTA.

    P and the exchange buffer also stage the output, 64 columns at a time: KV stages stay free for
    the next token's keys.
    """

    kv_stages: int = 6
    p_stages: int = 2

    @property
    def kv_stage_bytes(self) -> int:
        return KEYS * HALF_DIM * BF16_BYTES

    @property
    def p_stage_bytes(self) -> int:
        return ROWS * KEYS * BF16_BYTES

    @property
    def kv_elements(self) -> int:
        return self.kv_stages * self.kv_stage_bytes // BF16_BYTES

    @property
    def p_elements(self) -> int:
        return self.p_stages * self.p_stage_bytes // BF16_BYTES

    @property
    def exchange_elements(self) -> int:
        """fp32 partial scores that each softmax thread sends to the one with the same row."""
        return 2 * ROWS * HALF_KEYS

    @property
    def row_elements(self) -> int:
        """fp32 values of a row that its two threads tell each other: two slots a thread."""
        return 2 * ROWS * 2

    @property
    def head_bytes(self) -> int:
        """mbarriers, TMEM address and row values, padded to what swizzled buffers align to."""
        return 2048

    @property
    def total_bytes(self) -> int:
        kv_bytes, p_bytes = BF16_BYTES * self.kv_elements, BF16_BYTES * self.p_elements
        return self.head_bytes + kv_bytes + p_bytes + 4 * self.exchange_elements

    def __post_init__(self) -> None:
        assert self.p_stages == 2, f"P has {self.p_stages} stages, its release is also O's"
        assert self.total_bytes <= SMEM_LIMIT, (
            f"SMEM: plan needs {self.total_bytes} bytes, a CTA has {SMEM_LIMIT}"
        )


class PairPipelines(NamedTuple):
    """The graph: every tile runs load -> mma -> softmax -> mma. The barriers that `mma` waits for
    are those of the first CTA, whose MMA warp works for both; what it signals it signals to both.
    """

    q: Pipeline
    kv: Pipeline
    s: Pipeline
    p: Pipeline


@dataclass(frozen=True)
class PairPlan:
    """Every budget of the compiled kernel."""

    warps: PairWarps = PairWarps()
    tmem: PairTmem = PairTmem()
    smem: PairSmemPlan = PairSmemPlan()

    @property
    def pipelines(self) -> PairPipelines:
        smem, both = self.smem, 2 * self.warps.group_threads
        return PairPipelines(
            Pipeline("q", 1, "query", "mma", "Q in TMEM", both),
            Pipeline("kv", smem.kv_stages, "load", "mma", "KV tile", 1, 2 * smem.kv_stage_bytes),
            Pipeline("s", self.tmem.s_stages, "mma", "softmax", "two halves of S in TMEM", 1),
            Pipeline("p", smem.p_stages, "softmax", "mma", "P, and O is rescaled", both),
        )

    def __post_init__(self) -> None:
        barriers = 8 * sum(edge.mbarriers for edge in self.pipelines) + 8 + 4
        needed = barriers + 4 * self.smem.row_elements
        assert needed <= self.smem.head_bytes, (
            f"SMEM: {needed} bytes of barriers and row values, {self.smem.head_bytes} reserved"
        )

    def __str__(self) -> str:
        smem, tmem, warps = self.smem, self.tmem, self.warps
        lines = [
            f"head_dim {HEAD_DIM}, pair of CTAs: {HEADS} heads x {KEYS} keys, "
            f"{HALF_DIM} columns of every key in each CTA",
            f"warps    softmax {warps.softmax}, query {warps.query}, mma {warps.mma}, "
            f"load {warps.load}: {warps.threads} threads, at most {warps.register_limit} "
            "registers each",
            f"TMEM     O at {tmem.o_column}, Q at {tmem.q_column}, S at {tmem.s_column}: "
            f"{tmem.used_columns} of {tmem.allocated_columns} allocated columns",
            f"SMEM     KV {smem.kv_stages} x {smem.kv_stage_bytes}, "
            f"P {smem.p_stages} x {smem.p_stage_bytes}, exchange {4 * smem.exchange_elements}, "
            f"barriers and rows {smem.head_bytes}: {smem.total_bytes} of {SMEM_LIMIT} bytes",
        ]
        return "\n".join(lines + [str(edge) for edge in self.pipelines])
