"""Plan of the paged kernel whose products are of FP8 codes: budgets and barriers.

Plain Python: `print(CodesPlan(512, terms=2))` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.attention.sm90.plan import (
    HEADS,
    KEYS,
    SPAN_WORDS,
    PagedHeadsMPlan,
)
from dsv4.kernels.kit.kv_entry import GROUP, ROPE_DIM
from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, Registers, SmemPlan

PLACES = 2  # of P: that of a key tile is stored while the one before it is read
SCORE_WARPS = 4
QUERY_SCALES = 3  # row input beside those of `paged_score`


@dataclass(frozen=True)
class CodesPlan(PagedHeadsMPlan):
    """Every budget of the kernel that multiplies the codes of FP8 entries.

    Codes and rotated values of an entry stay as they are: 36 KB a key tile, where bf16 takes 64.

    Attributes:
        terms: e4m3 numbers whose sum a query, or a weight, is.
    """

    is_fp8: bool = True
    terms: int = 2

    # ---- tile shape ----

    @property
    def codes(self) -> int:
        """Columns of codes; the rotated ones are behind them."""
        return self.head_dim - ROPE_DIM

    @property
    def chunks(self) -> int:
        """Chunks of 64 columns of an output warpgroup, each the M of its products."""
        return self.head_dim // GROUP // 2

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a key tile, or of one term of a head tile's queries."""
        return KEYS * self.codes

    @property
    def rope_bytes(self) -> int:
        """Bytes of the rotated values of a key tile, or of a head tile's queries."""
        return KEYS * ROPE_DIM * 2

    @property
    def stages(self) -> int:
        return 3 if self.terms == 2 else 4

    # ---- budgets ----

    @property
    def registers(self) -> Registers:
        return Registers.of(self.warps, score=96, output=192, gather=32)

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan((
            Buffer("k_codes", "Float8E4M3FN", self.stages * self.code_bytes, 1024),
            Buffer("k_rope", "BFloat16", self.stages * KEYS * ROPE_DIM, 1024),
            Buffer("q_codes", "Float8E4M3FN", self.terms * self.code_bytes, 1024),
            Buffer("q_rope", "BFloat16", HEADS * ROPE_DIM, 1024),
            Buffer("p_codes", "Float8E4M3FN", PLACES * self.terms * HEADS * KEYS, 1024),
            Buffer("p_rope", "BFloat16", PLACES * HEADS * KEYS, 1024),
            # Of the keys of each stage.
            Buffer("scales", "Float32", self.stages * KEYS, 16),
            # Factors of a row's older accumulators that go with P, and which warps have such.
            Buffer("rescale", "Float32", PLACES * HEADS, 16),
            Buffer("changes", "Int32", PLACES * SCORE_WARPS, 16),
            Buffer("row_scale", "Float32", HEADS, 16),
            Buffer("span", "Int32", SPAN_WORDS, 16),
            self.tile_info,
            self.row_inputs,
            *self.barriers.split_buffers,
        ))  # fmt: skip

    @property
    def row_inputs(self) -> Buffer:
        """Sinks, factors and largest scores of rows, and scales of their codes."""
        return Buffer("row_inputs", "Float32", (QUERY_SCALES + 1) * HEADS)

    @property
    def barriers(self) -> BarrierGraph:
        score, output = Arrival("score", Arrive.WARP), Arrival("output", Arrive.WARP)
        rows = (Arrival("gather", Arrive.THREAD), Arrival("gather", Arrive.WARP))
        edges = (
            Edge("span", "key span", (Arrival("gather", Arrive.LANE),), (score, output)),
            Edge("p", "P and rescale factors; PV may issue", (score,), (output,), stages=PLACES),
            Edge("rows", "row scales", (score,), (output,)),
            Edge("kv", "a key tile", rows, (output,), stages=self.stages),
        )
        return BarrierGraph(self.warps, edges, self.lanes_per_warp)

    def __str__(self) -> str:
        return "\n".join((
            f"head_dim {self.head_dim}: {HEADS} heads x {KEYS} keys, queries and weights in "
            f"{self.terms} e4m3 terms",
            f"warps      {self.warps}",
            f"registers  {self.registers}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip
