"""Plan of Blackwell's paged kernel whose products are of FP8 codes: two CTAs a token.

Plain Python: `print(CodesPlan2Cta(terms=2))`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from dsv4.kernels.attention.sm100.plan_1cta import BF16_BYTES, KEYS, ROWS, SWIZZLE_ALIGN
from dsv4.kernels.attention.sm100.plan_2cta import HALF_DIM, HEAD_DIM
from dsv4.kernels.attention.sm100.plan_paged import GATHER_WARPS, INFO_STAGES, PagedPlan2Cta
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.plan import (
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    SmemPlan,
    Warps,
)

HALVES = 2
HALF_CODES = (HEAD_DIM - ROPE_DIM) // HALVES  # columns of codes that one CTA holds of every key
HALF_ROPE = ROPE_DIM // HALVES  # and of rotated ones
CODE_SPAN = 32  # bytes: 224 is no multiple of a wider swizzle span; and K of a product of codes
ROPE_SPAN = HALF_ROPE * BF16_BYTES
SPANS = HALF_CODES // CODE_SPAN
CODE_BYTES = KEYS * HALF_CODES  # of a key tile in one CTA
ROPE_BYTES = KEYS * ROPE_SPAN
STAGE_BYTES = CODE_BYTES + ROPE_BYTES
# bf16 scales of a tile's keys, the largest of each gather warp's; whole vectors.
SCALE_HALVES = KEYS + 8
GROUPS = 2  # softmax warpgroups, which take tiles in turn: each takes longer than its products
PLACES = HALVES * GROUPS  # softmax threads of a row
O_BOXES = HALF_DIM // HALF_ROPE // GROUPS  # of 32 columns of O that a softmax thread scales, stores
AHEAD = 2  # key tiles whose copies are under way


class CodesBarriers(IntEnum):
    """Hardware barriers beside the first two of `plan_2cta`."""

    PAIRS = 3  # of four pairs of softmax warps that hold the halves of the same scores
    ROWS = 7  # of the four softmax warps that share rows: even ones, odd ones
    QUERIES = 9  # of the two query warps that hold the halves of the same rows, likewise


@dataclass(frozen=True)
class CodesPlan2Cta(PagedPlan2Cta):
    """Budgets of each CTA.

    Attributes:
        terms: e4m3 numbers whose sum a query, or a weight, is.
    """

    kv_stages: int = 5
    is_fp8: bool = True
    terms: int = 2

    @property
    def warps(self) -> Warps:
        # Registers are those of warpgroups.
        return Warps.of(softmax=4 * GROUPS, query=4, load=GATHER_WARPS, mma=1, idle=3)

    @property
    def registers(self) -> Registers:
        """The query warps hold a whole Q until the one before it has been read."""
        return Registers.of(self.warps, softmax=104, query=152, load=72, mma=48, idle=48)

    @property
    def q_columns(self) -> int:
        """TMEM columns of Q: the terms of its codes, four to a column, then what is rotated."""
        return self.q_rope_column + HALF_ROPE * BF16_BYTES // 4

    @property
    def q_rope_column(self) -> int:
        """First of Q's columns that are rotated."""
        return self.terms * HALF_CODES // 4

    @property
    def p_code_bytes(self) -> int:
        """Bytes of a term of the weights of a key tile."""
        return ROWS * KEYS

    @property
    def p_bytes(self) -> int:
        """Bytes of the weights of a key tile: terms, then bf16."""
        return (self.terms + BF16_BYTES) * ROWS * KEYS

    @property
    def smem(self) -> SmemPlan:
        """The output has room of its own: its stores take as long as several key tiles."""
        return SmemPlan((
            Buffer("tile_info", "Int32", 4 * INFO_STAGES, 16),
            *self.barriers.buffers,
            Buffer("tmem_unused", "Int64", 1),
            Buffer("tmem_address", "Int32", 1),
            # What the four threads of a row tell each other, and what one tells all.
            Buffer("row_values", "Float32", (PLACES + 1) * ROWS, 16),
            # Row maxima, now and where the window was entered, as `sink_merge.RowState` has them.
            Buffer("row_maxima", "Float32", 3 * ROWS),
            Buffer("scales", "BFloat16", INFO_STAGES * SCALE_HALVES, 16),
            Buffer("q_scales", "Float32", ROWS),
            # Largest magnitudes of the halves of rows, of two work tiles in turn.
            Buffer("q_maxima", "Float32", 2 * HALVES * ROWS),
            Buffer("kv", "Uint8", self.kv_stages * STAGE_BYTES, SWIZZLE_ALIGN),
            Buffer("p", "Uint8", self.p_stages * self.p_bytes, SWIZZLE_ALIGN),
            Buffer("exchange", "Float32", GROUPS * ROWS * KEYS, SWIZZLE_ALIGN),
            Buffer("o", "BFloat16", ROWS * HEAD_DIM, SWIZZLE_ALIGN),
        ))  # fmt: skip

    @property
    def barriers(self) -> BarrierGraph:
        graph = super().barriers
        # A tile is one warpgroup's.
        group = replace(graph["info"].consumers[0], warps=4)
        threads = replace(graph["s"].consumers[0], warps=4)
        edges = (
            graph["q"],
            graph["kv"],
            replace(graph["s"], consumers=(threads,)),
            replace(graph["p"], producers=(threads,)),
            replace(graph["info"], consumers=(group,)),
            Edge("turn", "row maxima with a tile", (group,), (group,), GROUPS, is_signal=True),
            Edge(
                "q_scales",
                "scales of rows of Q",
                (Arrival("query", Arrive.WARP),),
                (Arrival("softmax", Arrive.WARP),),
            ),
        )
        return BarrierGraph(graph.warps, edges)

    def __post_init__(self) -> None:
        assert self.kv_stages > AHEAD, f"{self.kv_stages} stages, {AHEAD} tiles are under way"
        assert self.p_stages == 2, f"P has {self.p_stages} stages, its release is also O's"
        # Both assert what they hold.
        _ = self.tmem, self.smem

    @property
    def title(self) -> str:
        return f"{super().title}, queries and weights in {self.terms} e4m3 terms"
