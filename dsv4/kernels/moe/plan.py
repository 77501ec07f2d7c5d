"""Plans of the experts' products: which tiling a launch takes, and every budget of a tiling's CTA.

Plain Python: `print(ProductPlan.down(ExpertsConfig(4096, 2048), Tiling(8, 8), 1))` shows one.
Nothing here changes a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, Warps
from dsv4.kernels.kit.ring_plan import RingPlan
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS

CONSUMER_WARPS = 8
ACTIVATION_WARPS = 3
TILE_ROWS = 2 * PANEL_ROWS
WEIGHT_BYTES = 16384  # of a stage: 128 rows of two k blocks of FP4, or of one of FP8
SCALE_BYTES = 1024  # of a stage: a word for each row and k block of FP4
MIN_STAGES = 2
MOST_IN_FLIGHT = 16  # tokens of a tile with two accumulators


class Source(Enum):
    """Source of the activations of a product."""

    TOKENS = auto()  # codes of tokens, gathered by the pairs of a tile
    CODES = auto()  # codes of rows in the order of tiles
    BFLOAT16 = auto()  # bf16 rows in that order, quantised on their way into the ring


@dataclass(frozen=True)
class Tiling:
    """Division of the products by a launch. No bit of a result depends on it.

    Attributes:
        tokens: of a tile of a routed expert: columns of its products.
        shared_tokens: of a tile of the shared expert, `tokens` times a power of two: all tokens
            pass it, and each of its tiles reads all of its weights.
        has_codes: whether the second product gets codes of h, from a launch between: with many
            tokens of an expert, each of its tiles would quantise them again.
        most_stages: of a ring. Copies of all stages share the memory, so that a deep ring gets its
            first stage late; few tokens are over before that is made up for.
        ctas_per_sm: two, so that the next launch's CTAs fill their rings while this one ends; the
            accumulators of many tokens take the registers of both.
    """

    tokens: int
    shared_tokens: int
    has_codes: bool = False
    most_stages: int = 4
    ctas_per_sm: int = 2


@dataclass(frozen=True)
class Kind:
    """Passage of the tiles of one kind of expert through the ring.

    Attributes:
        dtype: of its weights, "fp4" or "fp8".
        tokens: columns.
        blocks: k blocks of a stage.
        steps: stages of a tile.
        is_packed: whether scales of FP4 groups fold into e4m3 codes.
    """

    dtype: str
    tokens: int
    blocks: int
    steps: int
    is_packed: bool

    @property
    def is_summed_by_step(self) -> bool:
        """Whether 32 elements are summed by themselves, instead of a k block."""
        return self.dtype == "fp4" and not self.is_packed

    @property
    def in_flight(self) -> int:
        """k blocks of a stage whose products are under way at a time: as registers allow."""
        return self.blocks if self.tokens <= MOST_IN_FLIGHT and not self.is_summed_by_step else 1

    @property
    def column_groups(self) -> int:
        """Groups of eight columns."""
        return self.tokens // 8

    @property
    def block_bytes(self) -> int:
        """Of a panel's k block."""
        return PANEL_ROWS * K_BLOCK // (2 if self.dtype == "fp4" else 1)

    @property
    def scale_block_bytes(self) -> int:
        """Of the scales of a panel's k block that pass through the ring as they are."""
        return 4 * PANEL_ROWS if self.dtype == "fp4" else 0


@dataclass(frozen=True)
class ProductPlan(RingPlan):
    """Every budget of a CTA.

    Attributes:
        in_features: K.
        out_rows: of an expert's weights in a pair of panels: of gate, and of up, or of down.
        row_tiles: pairs of panels.
        expert_dtype, scale_form: as in `ExpertsConfig`.
        source: of the activations.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
    """

    in_features: int
    out_rows: int
    row_tiles: int
    expert_dtype: str
    scale_form: str
    tiling: Tiling
    source: Source
    lanes_per_warp: int = 1

    @classmethod
    def gate_and_up(cls, config: ExpertsConfig, tiling: Tiling, lanes_per_warp: int) -> ProductPlan:
        """Of w1 and w3: a tile has 64 rows of each."""
        return cls(
            config.hidden, config.inner, config.inner // PANEL_ROWS, config.expert_dtype,
            config.scale_form, tiling, Source.TOKENS, lanes_per_warp,
        )  # fmt: skip

    @classmethod
    def down(cls, config: ExpertsConfig, tiling: Tiling, lanes_per_warp: int) -> ProductPlan:
        """Of w2: a tile has 128 rows."""
        source = Source.CODES if tiling.has_codes else Source.BFLOAT16
        return cls(
            config.inner, config.hidden, config.hidden // TILE_ROWS, config.expert_dtype,
            config.scale_form, tiling, source, lanes_per_warp,
        )  # fmt: skip

    @property
    def k_blocks(self) -> int:
        return self.in_features // K_BLOCK

    @property
    def routed(self) -> Kind:
        is_packed = self.scale_form == "packed"
        return self._kind(self.expert_dtype, self.tiling.tokens, is_packed)

    @property
    def shared(self) -> Kind:
        return self._kind("fp8", self.tiling.shared_tokens, True)

    def _kind(self, dtype: str, tokens: int, is_packed: bool) -> Kind:
        blocks = 2 if dtype == "fp4" else 1
        return Kind(dtype, tokens, blocks, -(-self.k_blocks // blocks), is_packed)

    # ---- a stage ----

    @property
    def x_rows(self) -> int:
        """Rows of 128 codes of a stage."""
        return max(kind.blocks * kind.tokens for kind in (self.routed, self.shared))

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(consumers=CONSUMER_WARPS, load=1, activations=ACTIVATION_WARPS)

    @property
    def ctas_per_sm(self) -> int:
        return self.tiling.ctas_per_sm

    @property
    def most_stages(self) -> int:
        return self.tiling.most_stages

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        return (
            # [stage, panel, k block of the stage]
            Buffer("weight", "Uint8", stages * WEIGHT_BYTES, 1024),
            Buffer("x", "Float8E4M3FN", stages * self.x_rows * K_BLOCK, 1024),
            Buffer("scale", "Uint8", stages * SCALE_BYTES, 128),
            # [stage, k block of the stage, token]
            Buffer("x_scale", "Float32", stages * self.x_rows, 16),
            # [stage, panel], of FP8 weights
            Buffer("block_scale", "Float32", stages * 2, 8),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        edge = Edge(
            "ring", "k blocks of a weight tile, of its tokens",
            (Arrival("load", Arrive.TMA), Arrival("activations", Arrive.WARP, warps=1)),
            (Arrival("consumers", Arrive.WARP),),
            stages,
        )  # fmt: skip
        return BarrierGraph(self.warps, (edge,), self.lanes_per_warp)

    def __post_init__(self) -> None:
        tiling = self.tiling
        assert tiling.tokens % 8 == 0 and self.x_rows % tiling.tokens == 0, tiling
        assert self.x_rows % tiling.shared_tokens == 0, tiling
        assert self.stages >= MIN_STAGES, f"{tiling}: K {self.in_features} has {self.stages} stages"

    def __str__(self) -> str:
        tiling = self.tiling
        return "\n".join((
            f"K {self.in_features} {self.expert_dtype}, {TILE_ROWS} rows x {tiling.tokens} tokens "
            f"({tiling.shared_tokens} of the shared expert), {tiling.ctas_per_sm} CTAs an SM",
            f"warps      {self.warps}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


def tilings(config: ExpertsConfig) -> tuple[Tiling, ...]:
    """Tilings of the kernels, by the tokens of a tile."""
    return (
        Tiling(8, 8, most_stages=3),
        Tiling(8, 32),
        Tiling(8, 32, has_codes=True),
        Tiling(16, 32, has_codes=True),
        Tiling(32, 32, has_codes=True),
    )


# Most tokens of a launch for each tiling but the last.
MOST_TOKENS = (8, 128, 256, 512)


def choose(config: ExpertsConfig, tokens: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    for index, most in enumerate(MOST_TOKENS):
        if tokens <= most:
            return index
    return len(MOST_TOKENS)
