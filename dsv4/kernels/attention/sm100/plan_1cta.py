"""Plan of the 1-CTA attention kernel of Blackwell: tiles, warps, TMEM, shared memory, barriers.

Plain Python, and the kernel takes every size from it: `print(Plan1Cta(head_dim=512))` shows it
without a GPU and without the kernel compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dsv4.kernels.kit.plan import (
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    SmemPlan,
    TmemPlan,
    Warps,
)

SUPPORTED_HEAD_DIMS = (64, 128, 256, 512)
BF16_BYTES = 2
SWIZZLE_ALIGN = 1024  # of the buffers that TMA and the tensor core address
ROWS = 64  # query heads of one CTA; 64 fp32 rows x 512 columns are half of TMEM
KEYS = 64  # keys of one tile
P_STAGES = 2
S_STAGES = 2
MAX_KV_STAGES = 8  # enough to cover the latency of memory at every head_dim


class NamedBarriers(IntEnum):
    """Hardware barriers of a CTA; 0 is that of `__syncthreads`."""

    TMEM_ALLOCATED = 1  # the warps that use TMEM
    TMEM_UNUSED = 2  # the warps that read or write TMEM by themselves


def budgets(title: str, plan) -> str:
    """A plan for people: what it is of, and what each resource is used for."""
    return "\n".join([
        title,
        f"warps      {plan.warps}",
        f"registers  {plan.registers}",
        f"TMEM       {plan.tmem}",
        f"SMEM       {plan.smem}",
        str(plan.barriers),
    ])  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """Slices of head_dim: a KV tile of `KEYS` rows is `chunks` boxes of `chunk_dim` columns."""

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
class Plan1Cta:
    """Budgets of one compiled 1-CTA kernel.

    `multicast_ctas` CTAs of a cluster each load that part of every KV chunk for all of them.
    """

    head_dim: int
    multicast_ctas: int = 1
    p_stages: int = P_STAGES
    s_stages: int = S_STAGES

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.head_dim)

    @property
    def warps(self) -> Warps:
        """Warp w reaches TMEM lanes 32 (w % 4) to 32 (w % 4) + 31: the softmax is a warpgroup."""
        return Warps.of(softmax=4, mma=1, load=1)

    @property
    def registers(self) -> Registers:
        """With 192 threads the register file is no constraint: no role gives registers up."""
        return Registers.of(self.warps)

    @property
    def tmem(self) -> TmemPlan:
        """A 64-row accumulator fills 16 of every 32 lanes. Two accumulators therefore share
        columns, the second one 16 lanes higher: both chunks of O (head_dim 512), both stages of S.
        """
        return TmemPlan((("o", self.tiling.chunk_dim), ("s", KEYS)))

    @property
    def kv_stage_bytes(self) -> int:
        return KEYS * self.tiling.chunk_dim * BF16_BYTES

    @property
    def kv_stages(self) -> int:
        """KV chunks in flight: what fits beside the other buffers."""
        more = self._smem(kv_stages=1).free_bytes // self.kv_stage_bytes
        return min(MAX_KV_STAGES, 1 + more)

    @property
    def smem(self) -> SmemPlan:
        """The output is staged over Q, which no product reads any more by then."""
        return self._smem(self.kv_stages)

    @property
    def barriers(self) -> BarrierGraph:
        """Every tile runs load -> mma -> softmax -> mma -> softmax."""
        return self._barriers(self.kv_stages)

    def _smem(self, kv_stages: int) -> SmemPlan:
        kv_elements = kv_stages * self.kv_stage_bytes // BF16_BYTES
        p_elements = self.p_stages * ROWS * KEYS
        return SmemPlan((
            *self._barriers(kv_stages).buffers,
            Buffer("tmem_address", "Int32", 1),
            Buffer("q", "BFloat16", ROWS * self.head_dim, SWIZZLE_ALIGN),
            Buffer("kv", "BFloat16", kv_elements, SWIZZLE_ALIGN),
            Buffer("p", "BFloat16", p_elements, SWIZZLE_ALIGN),
        ))  # fmt: skip

    def _barriers(self, kv_stages: int) -> BarrierGraph:
        load, mma = Arrival("load", Arrive.TMA), Arrival("mma", Arrive.MMA)
        softmax = Arrival("softmax", Arrive.THREAD)
        # A chunk is filled anew once every CTA that it was multicast to is done with it.
        mma_of_all = Arrival("mma", Arrive.MMA, ctas=self.multicast_ctas)
        q_bytes = ROWS * self.head_dim * BF16_BYTES
        return BarrierGraph(self.warps, (
            Edge("q", "Q", (load,), (mma,), tx_bytes=q_bytes),
            Edge("kv", "KV chunk", (load,), (mma_of_all,), kv_stages, self.kv_stage_bytes),
            Edge("s", "S in TMEM", (mma,), (softmax,), self.s_stages),
            Edge("p", "P, and O is rescaled", (softmax,), (mma,), self.p_stages),
            Edge("o", "O holds tile k", (mma,), (softmax,)),
        ))  # fmt: skip

    def __post_init__(self) -> None:
        tiling, needed = self.tiling, 2 * self.tiling.chunks
        assert self.warps["softmax"].is_warpgroup, "TMEM lanes: the softmax must be a warpgroup"
        assert tiling.chunks <= 2, f"O has {tiling.chunks} chunks, lanes hold 2"
        assert self.s_stages == 2, f"S has {self.s_stages} stages, lanes hold 2"
        assert self.kv_stages >= needed, (
            f"SMEM: {self.kv_stages} KV chunks fit, two tiles need {needed}"
        )

    def __str__(self) -> str:
        title = (
            f"head_dim {self.head_dim}, 1 CTA: {ROWS} heads x {KEYS} keys, "
            f"{self.tiling.chunks} chunks of {self.tiling.chunk_dim} columns"
        )
        return budgets(title, self)
