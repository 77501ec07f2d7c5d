"""Plan of attention in FP4 on Blackwell: one place for scores, columns for scales.

Plain Python: `print(Fp4Plan.of(config))` works without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from dsv4.kernels.kit.plan import Buffer, TmemPlan
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import TILE_KEYS
from dsv4.kernels.lowp.sm100.plan import GROUP_QUERIES, GROUPS, AttentionPlanSm100

DEPTH = 64  # elements of K of a product, of which a row has a word of scales
ATOM_BYTES = 512  # of scales that a copy takes to four columns
MEAN_ROWS = 8  # that a swizzle permutes in ways of their own
WORD_ROWS = 32  # whose words of scales are a column
WEIGHT_BYTES = TILE_KEYS // 2  # of a row's codes of a tile
WEIGHT_SCALE_BYTES = TILE_KEYS // DEPTH * ATOM_BYTES  # of a warpgroup's rows


@dataclass(frozen=True)
class Fp4Plan(AttentionPlanSm100):
    """Every budget of a CTA whose factors are all in FP4.

    Attributes:
        smooth: format of queries where they come to codes without their means, "bf16" or "fp16".
    """

    smooth: str = ""

    @classmethod
    def of(cls, config: QuantizedAttentionConfig, lanes_per_warp: int = 1) -> Self:
        found = super().of(config, lanes_per_warp)
        smooth = {"bfloat16": "bf16", "float16": "fp16"}[config.dtype] if config.smooth_q else ""
        return replace(found, smooth=smooth)

    @property
    def smooth_bytes(self) -> int:
        return 2 * TILE_KEYS * self.dim if self.smooth else 0

    @property
    def mean_bytes(self) -> int:
        """Of the means of a warpgroup's queries: eight equal rows, which stand for all."""
        return MEAN_ROWS * 2 * self.dim if self.smooth else 0

    @property
    def query_scale_bytes(self) -> int:
        """Of a warpgroup's queries."""
        return self.dim // DEPTH * ATOM_BYTES

    @property
    def tmem(self) -> TmemPlan:
        """Scores of both warpgroups by turns, the sums of each, and the scales of the factors of
        either product: two places for scores would leave nothing for scales."""
        sums = ((f"sums{g}", self.dim) for g in range(GROUPS))
        scales = (
            ("query_scales", self.query_scale_bytes),
            ("key_scales", self.key_scale_bytes),
            ("weight_scales", WEIGHT_SCALE_BYTES),
            ("value_scales", self.value_scale_bytes),
        )
        columns = ((name, size // ATOM_BYTES * 4) for name, size in scales)
        return TmemPlan((("scores", TILE_KEYS), *sums, *columns))

    def columns(self, name: str) -> tuple[int, int]:
        if name == "scores":
            return (self.tmem.column(name),) * 2
        return super().columns(name)

    @property
    def own_buffers(self) -> tuple[str, ...]:
        smooth = ("means", "smooth_keys") if self.smooth else ()
        return ("query_scales", "weight_scales", *smooth)

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        weights = Buffer("weights", "Uint8", self.tile_queries * WEIGHT_BYTES, 1024)
        means = Buffer("means", "BFloat16", GROUPS * self.mean_bytes // 2, 1024)  # or fp16
        keys = Buffer("smooth_keys", "BFloat16", stages * self.smooth_bytes // 2, 1024)
        return (
            *self._operands(stages, (weights, means, keys) if self.smooth else (weights,)),
            Buffer("query_scales", "Uint8", GROUPS * self.query_scale_bytes, 128),
            Buffer("weight_scales", "Uint8", GROUPS * WEIGHT_SCALE_BYTES, 128),
            Buffer("tmem_address", "Int32", 1),
            *self._barriers(stages).split_buffers,
        )


def scale_word(row):
    """Place of a row's word of scales in an atom of 128 rows, in words."""
    return row % WORD_ROWS * (GROUP_QUERIES // WORD_ROWS) + row // WORD_ROWS
