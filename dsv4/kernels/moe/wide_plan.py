"""Plan of the experts' products for many tokens: tiles of 128 rows and up to 32, 64 or 128 tokens.

A launch before gathers the tokens' codes in the order of tiles, so that TMA loads them; scales of
activations lie by k block, in fp32. Two CTAs with row tiles of their own share a tile's tokens.
Nothing here changes a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4.kernels.kit.plan import (
    WARP_THREADS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    Warps,
)
from dsv4.kernels.moe.config import FOLDED_FORMS, ExpertsConfig
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS, VECTOR_BYTES
from dsv4.kernels.moe.plan import WARPGROUP, Kind, ProductPlan, Source, Tiling

# Columns that there is code for, by the most of a tiling: a tile takes the fewest that hold its
# tokens. Each group of eight is products and promotion of its own.
COLUMNS = {32: (8, 16, 24, 32), 64: (32, 48, 64), 128: (32, 48, 64, 80, 96, 112, 128)}
LOAD_WARPS = 4  # of each stage, a panel each
SCALE_BYTES = 4  # of a token's k block, fp32
# TMA loads from multiples of so many scales (16 bytes) on, and a lane reads two. So scales are
# there twice, the second time moved up by one: those of a tile begin at an even place in one.
SCALE_STEP = 4
SCALE_COPIES = 2


def scale_columns(rows: Any) -> Any:
    """Columns of the scales of so many rows."""
    return (rows + SCALE_COPIES - 1 + SCALE_STEP - 1) // SCALE_STEP * SCALE_STEP


@dataclass(frozen=True)
class WidePlan(ProductPlan):
    """Every budget of a CTA; a stage is one k block."""

    @classmethod
    def up(cls, config: ExpertsConfig, tiling: Tiling, lanes_per_warp: int) -> WidePlan:
        """Of w1 and w3, of all experts: a tile has as many rows of each."""
        return cls(
            config.hidden, config.inner, config.inner // (PANEL_ROWS * tiling.warpgroups),
            config.expert_dtype, config.scale_form, tiling, Source.TOKENS, True, True,
            lanes_per_warp,
        )  # fmt: skip

    @property
    def routed(self) -> tuple[Kind, ...]:
        is_packed = self.scale_form in FOLDED_FORMS
        return tuple(self._kind(self.expert_dtype, count, is_packed) for count in self.columns)

    @property
    def columns(self) -> tuple[int, ...]:
        """Of the kinds of routed tiles."""
        return COLUMNS[self.tiling.tokens]

    @property
    def sharing(self) -> int:
        """CTAs of a cluster, which have row tiles of their own and load the same tokens once. Where
        these are few beside the weights, none waits for another."""
        is_shared = self.tiling.tokens == max(COLUMNS) and self.row_tiles % 2 == 0
        return 2 if is_shared else 1

    @property
    def row_groups(self) -> int:
        """Row tiles of the clusters together."""
        return self.row_tiles // self.sharing

    def _kind(self, dtype: str, tokens: int, is_packed: bool) -> Kind:
        return Kind(dtype, tokens, 1, self.k_blocks, is_packed)

    @property
    def scale_rows(self) -> int:
        """Scales of activations of a stage, up to a multiple of what TMA aligns its targets to."""
        return self.x_rows + WARP_THREADS

    def stage_bytes(self, kind: Kind) -> int:
        scales = (kind.tokens + SCALE_STEP) * SCALE_BYTES
        return super().stage_bytes(kind) + kind.tokens * K_BLOCK + scales

    @property
    def staged_row(self) -> int:
        """Bytes of a token's outputs of down in shared memory, padded: eight rows are in banks of
        their own."""
        return 2 * self.tile_rows + VECTOR_BYTES

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(consumers=WARPGROUP * self.tiling.warpgroups, load=LOAD_WARPS)

    @property
    def registers(self) -> Registers:
        """Most of them for the accumulators; two CTAs share those of an SM."""
        consumers, load = (232, 40) if self.ctas_per_sm == 1 else (104, 32)
        return Registers.of(self.warps, consumers=consumers, load=load)

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        return (
            # [stage, panel]
            Buffer("weight", "Uint8", stages * self.weight_bytes, 1024),
            Buffer("x", "Float8E4M3FN", stages * self.x_rows * K_BLOCK, 1024),
            Buffer("scale", "Uint8", max(stages * self.scale_bytes, 128), 128),
            # [stage, token]
            Buffer("x_scale", "Float32", stages * self.scale_rows, 128),
            *(() if self.is_gated else self._staged_buffers),
            *self._barriers(stages).split_buffers,
        )

    @property
    def _staged_buffers(self) -> tuple[Buffer, ...]:
        return (
            # [token, output] bf16, padded; row of y by token
            Buffer("staged", "Uint8", self.x_rows * self.staged_row, 128),
            Buffer("places", "Int32", self.x_rows, 16),
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        edge = Edge(
            "ring", "k block of a weight tile, of its tokens",
            (Arrival("load", Arrive.TMA),),
            (Arrival("consumers", Arrive.WARP, ctas=self.sharing),),
            stages,
        )  # fmt: skip
        return BarrierGraph(self.warps, (edge,), self.lanes_per_warp)

    def __post_init__(self) -> None:
        assert self.tiling.tokens == self.tiling.shared_tokens == self.columns[-1], self.tiling
        assert 2 * self.panels == LOAD_WARPS, self.tiling
