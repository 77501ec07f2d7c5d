"""Plan of the 2-CTA attention kernel of Blackwell: warps, TMEM, shared memory, barriers.

Plain Python: `print(Plan2Cta())` shows it without a GPU and without the kernel compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dsv4.kernels.attention.sm100.plan_1cta import BF16_BYTES, KEYS, ROWS, SWIZZLE_ALIGN, budgets
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

HEADS = 2 * ROWS  # of a cluster; each CTA has the rows of 64
HEAD_DIM = 512
HALF_DIM = HEAD_DIM // 2  # columns of every key that one CTA holds
HALF_KEYS = KEYS // 2  # scores of a tile that one softmax thread exponentiates


class NamedBarriers(IntEnum):
    """Hardware barriers of a CTA; 0 is that of `__syncthreads`."""

    TMEM_ALLOCATED = 1  # all warps but the load warp
    TMEM_UNUSED = 2  # softmax and query warps
    # The two warps that hold the halves of the same rows: warps 0 and 2, warps 1 and 3.
    EVEN_WARPS = 3
    ODD_WARPS = 4


@dataclass(frozen=True)
class Plan2Cta:
    """Budgets of each CTA of the 2-CTA kernel."""

    kv_stages: int = 6
    p_stages: int = 2
    s_stages: int = 2

    @property
    def warps(self) -> Warps:
        """Two warpgroups: warp w reaches TMEM lanes 32 (w % 4) to 32 (w % 4) + 31."""
        return Warps.of(softmax=4, query=4, mma=1, load=1)

    @property
    def registers(self) -> Registers:
        return Registers.of(self.warps)

    @property
    def q_columns(self) -> int:
        """TMEM columns of Q: two bf16 each."""
        return HALF_DIM // 2

    @property
    def tmem(self) -> TmemPlan:
        """A 2-CTA accumulator of 128 rows puts 64 rows into each CTA and gives the upper half of
        its columns the upper 64 lanes. So 512 columns of O take 256, and lanes 0-63 and 64-127 of Q
        can hold different columns of the same heads.
        """
        return TmemPlan((("o", HALF_DIM), ("q", self.q_columns), ("s", self.s_stages * KEYS)))

    @property
    def smem(self) -> SmemPlan:
        """P and the exchange buffer also stage the output, 64 columns at a time: KV stages stay
        free for the next token's keys.
        """
        return SmemPlan((
            *self.barriers.buffers,
            Buffer("tmem_unused", "Int64", 1),  # mbarrier of the TMEM allocator
            Buffer("tmem_address", "Int32", 1),
            # What the two threads of a row send each other of it: two slots a thread.
            Buffer("row_values", "Float32", 2 * ROWS * 2, 16),
            Buffer("kv", "BFloat16", self.kv_stages * KEYS * HALF_DIM, SWIZZLE_ALIGN),
            Buffer("p", "BFloat16", self.p_stages * ROWS * KEYS, SWIZZLE_ALIGN),
            # Partial scores that each softmax thread sends to the one with the same row.
            Buffer("exchange", "Float32", 2 * ROWS * HALF_KEYS, SWIZZLE_ALIGN),
        ))  # fmt: skip

    @property
    def barriers(self) -> BarrierGraph:
        """Every tile runs load -> mma -> softmax -> mma. The barriers that `mma` waits for are
        those of CTA 0, whose MMA warp issues for both CTAs; its commits arrive in both.
        """
        load, mma = Arrival("load", Arrive.TMA), Arrival("mma", Arrive.MMA)
        query = Arrival("query", Arrive.THREAD, ctas=2)
        softmax = Arrival("softmax", Arrive.THREAD, ctas=2)
        kv_bytes = 2 * KEYS * HALF_DIM * BF16_BYTES  # both CTAs' halves
        return BarrierGraph(self.warps, (
            Edge("q", "Q in TMEM", (query,), (mma,)),
            Edge("kv", "KV tile", (load,), (mma,), self.kv_stages, kv_bytes),
            Edge("s", "two halves of S in TMEM", (mma,), (softmax,), self.s_stages),
            Edge("p", "P, and O is rescaled", (softmax,), (mma,), self.p_stages),
        ))  # fmt: skip

    def __post_init__(self) -> None:
        for role in ("softmax", "query"):
            assert self.warps[role].is_warpgroup, f"TMEM lanes: {role} must be a warpgroup"
        assert self.p_stages == 2, f"P has {self.p_stages} stages, its release is also O's"
        # Both assert what they hold.
        _ = self.tmem, self.smem

    @property
    def title(self) -> str:
        """What a cluster computes."""
        return (
            f"head_dim {HEAD_DIM}, 2 CTAs: {HEADS} heads x {KEYS} keys, "
            f"{HALF_DIM} columns of every key in each CTA"
        )

    def __str__(self) -> str:
        return budgets(self.title, self)
