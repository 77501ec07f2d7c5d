"""Plan of attention on Blackwell: warps, registers, Tensor Memory, shared memory, barriers.

Plain Python: `print(AttentionPlanSm100(128))` works without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dsv4.arch import SM_100A
from dsv4.kernels.kit.plan import (
    WARPGROUP_WARPS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    TmemPlan,
    Warps,
)
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.lowp.plan import FORMATS, TILE_KEYS, WORK_QUERIES, TilePlan

GROUPS = 2  # softmax warpgroups: one computes weights while the products of the other run
GROUP_QUERIES = 128  # of a warpgroup: lanes of Tensor Memory, a row of scores each
MOST_STAGES = 6  # of 128 keys


class NamedBarriers(IntEnum):
    """Hardware barriers of a CTA; 0 is that of `__syncthreads`."""

    QUERIES = 1  # of the first warpgroup; that of the second follows
    TURNS = 3  # the same
    TMEM_UNUSED = 5  # the warps that read sums


@dataclass(frozen=True)
class AttentionPlanSm100(TilePlan):
    """Every budget of a CTA."""

    arch = SM_100A
    groups = GROUPS
    group_queries = GROUP_QUERIES

    @property
    def most_stages(self) -> int | None:
        return MOST_STAGES * TILE_KEYS // self.tile_keys

    @property
    def warps(self) -> Warps:
        """Warp w reaches TMEM lanes 32 (w % 4) to 32 (w % 4) + 31. One warp loads: four roles of a
        warpgroup give registers up together."""
        return Warps.of(softmax=GROUPS * WARPGROUP_WARPS, mma=1, load=WARPGROUP_WARPS - 1)

    @property
    def registers(self) -> Registers:
        return Registers.of(self.warps, softmax=224, mma=56, load=56)

    @property
    def tmem(self) -> TmemPlan:
        """Scores of each warpgroup, and its sums."""
        scores = [(f"scores{g}", self.tile_keys) for g in range(GROUPS)]
        return TmemPlan((*scores, *((f"sums{g}", self.dim) for g in range(GROUPS))))

    @property
    def weight_bytes(self) -> int:
        """Of a code of a weight."""
        return 1 if self.pv == "fp8" else 2

    @property
    def weight_span(self) -> int:
        """Bytes of a row's weights of a tile of keys that lie together, 64 or 128: spans lie one
        after the other for all rows, as those of queries' rows do."""
        return min(self.tile_keys * self.weight_bytes, SPAN_BYTES)

    @property
    def weight_span_bytes(self) -> int:
        """Of a span of all rows."""
        return self.tile_queries * self.weight_span

    @property
    def shares_rows(self) -> bool:
        # Codes of 128 channels, their rows, fp16 weights and two stages are more than there is.
        return self.pv == "fp16" and self.dim == 128 and self.tile_keys == TILE_KEYS

    @property
    def group_bytes(self) -> int:
        """Of the codes of a warpgroup's queries."""
        return GROUP_QUERIES * self.row_bytes

    @property
    def own_buffers(self) -> tuple[str, ...]:
        """Shared memory that other formats do not have."""
        return ()

    def columns(self, name: str) -> tuple[int, int]:
        """First columns of the warpgroups' scores or sums."""
        return self.tmem.column(f"{name}0"), self.tmem.column(f"{name}1")

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        weights = Buffer("weights", FORMATS[self.pv], self.tile_queries * self.tile_keys, 1024)
        return (
            *self._operands(stages, () if self.shares_rows else (weights,)),
            Buffer("tmem_address", "Int32", 1),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        mma = Arrival("mma", Arrive.MMA)
        softmax = Arrival("softmax", Arrive.WARP)
        group = (Arrival("softmax", Arrive.WARP, warps=WARPGROUP_WARPS),)
        # Scales that come with keys are read by the softmax.
        of_keys = (mma, softmax) if self.has_row_scales else (mma,)
        edges = (
            *self._loads(stages, (softmax,), of_keys, (mma,)),
            # By warpgroup. Sums are the way back of weights, and the last scores that of queries.
            Edge("coded", "codes of queries", group, (mma,), GROUPS, is_signal=True),
            Edge("scores", "scores of a tile", (mma,), group, GROUPS),
            Edge("weights", "codes of weights, and scaled sums", group, (mma,), GROUPS,
                 is_signal=True),
            Edge("sums", "sums with a tile", (mma,), group, GROUPS, is_signal=True),
        )  # fmt: skip
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)

    def __post_init__(self) -> None:
        assert self.tile_queries == WORK_QUERIES[self.arch.name]
        assert self.stages >= 2, f"SMEM: {self.stages} stages fit, keys are a tile ahead of values"

    def __str__(self) -> str:
        return (
            f"warps      {self.warps}\nregisters  {self.registers}\nTMEM       {self.tmem}\n"
            f"SMEM       {self.smem}\n{self.barriers}"
        )
