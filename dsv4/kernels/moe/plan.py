"""Plans of the experts' products: which tiling a launch takes, and every budget of a tiling's CTA.

Plain Python: `print(ProductPlan.down(ExpertsConfig(4096, 2048), Tiling(8, 8, 8), 1))` shows one.
Nothing here changes a bit of a result.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import Enum, auto

from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, Warps
from dsv4.kernels.kit.ring_plan import RingPlan
from dsv4.kernels.moe.config import BF16_DTYPES, FOLDED_FORMS, ExpertsConfig
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS

WARPGROUP = 4  # warps
# Each fills every third stage: a ring has as many, or their parities would not tell phases apart.
ACTIVATION_WARPS = 3
PANEL_BLOCKS = 4  # k blocks of FP4 in a stage of a tile of one warpgroup; half as many of FP8
WEIGHT_BITS = {"fp4": 4, "nvfp4": 4, "fp8": 8, "bfloat16": 16}
ROW_SCALE_BYTES = {"fp4": 4, "nvfp4": 8}  # of a row's k block
FEWEST_COLUMNS = 8
MOST_IN_FLIGHT = 16  # tokens of a tile with two accumulators
MOST_LONG = 16  # tokens of the shared expert alone whose stages are long
FEW_COLUMNS = 32  # of a tile of the shared expert alone that has one warpgroup
# Of a board, from the load warp to all others: the tile under way, and the next one.
BOARD_STAGES = 2
BOARD_WORDS = 8  # of a tile


class Source(Enum):
    """Source of the activations of a product."""

    TOKENS = auto()  # codes of tokens, gathered by the pairs of a tile
    CODES = auto()  # codes of rows in the order of tiles
    BFLOAT16 = auto()  # bf16 rows in that order, quantised on their way into the ring
    BFLOAT16_TOKENS = auto()  # bf16 tokens of the shared expert alone, quantised likewise


@dataclass(frozen=True)
class Tiling:
    """Division of the products by a launch. No bit of a result depends on it.

    Attributes:
        tokens: most of a tile of a routed expert: columns of its products. Above eight, tiles of
            at most half as many have half as many columns.
        alone_tokens: of a tile of the shared expert's first product, in a launch of its own.
        shared_tokens: of a tile of its second one, beside the routed: all tokens pass it, and each
            of its tiles reads all of its weights.
        rounds: whether the second product gets codes of h, those of routed rows from the first one,
            whose tiles have whole groups of their channels: with many tokens of an expert, each of
            its tiles would quantise them again.
        warpgroups: of consumers, each with 64 rows of a tile: tall tiles load their activations
            once for more rows, small ones spread over more SMs.
        ctas_per_sm: several, so that the next launch's CTAs fill their rings while this one ends;
            the accumulators of many tokens take the registers of all.
        stages: of a ring at most. Copies of all stages share the memory, so that a deep ring gets
            its first stage late; few tokens are over before that is made up for.
        is_joint: whether both products are one launch: the weights of the second are on their way
            while the first one ends.
        reads_once: whether few tiles read a weight, so that it may leave L2 first: what every layer
            reads stays there, instructions above all.
        is_wide: whether a launch before gathers the tokens: see `wide_plan`.
    """

    tokens: int
    alone_tokens: int
    shared_tokens: int
    rounds: bool = False
    warpgroups: int = 2
    ctas_per_sm: int = 2
    stages: int = 4
    is_joint: bool = False
    reads_once: bool = True
    is_wide: bool = False

    @property
    def alone(self) -> Tiling:
        """Of the launch of the shared expert's first product, whose tiles are fewer than SMs: a CTA
        has the ring of a whole one."""
        warpgroups = 1 if self.alone_tokens <= FEW_COLUMNS else 2
        return replace(
            self, shared_tokens=self.alone_tokens, warpgroups=warpgroups, ctas_per_sm=1, stages=8,
            is_joint=False,
        )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Passage of the tiles of one kind of expert through the ring.

    Attributes:
        dtype: of its weights: "fp4" or "fp8", multiplied in e4m3; "nvfp4" or "bfloat16", in bf16.
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
    def is_folded(self) -> bool:
        """Whether scales of FP4 groups fold into codes: then words of codes of activations are
        interleaved (`layout`)."""
        return self.dtype == "fp4" and self.is_packed

    @property
    def is_bf16(self) -> bool:
        """Whether products are of bf16, activations as they are: two rows of 64 in the place of one
        of 128 codes."""
        return self.dtype in BF16_DTYPES

    @property
    def x_rows(self) -> int:
        """Rows of 128 bytes of a k block's tokens."""
        return self.tokens * (2 if self.is_bf16 else 1)

    @property
    def in_flight(self) -> int:
        """k blocks of a stage whose products are under way at a time: as registers allow, which
        decoding of FP4 takes."""
        most = 4 if self.dtype == "fp8" and self.tokens <= MOST_LONG else 2
        return min(self.blocks, most) if self.tokens <= MOST_IN_FLIGHT else 1

    @property
    def column_groups(self) -> int:
        """Groups of eight columns."""
        return self.tokens // 8

    @property
    def block_bytes(self) -> int:
        """Of a panel's k block."""
        return PANEL_ROWS * K_BLOCK * WEIGHT_BITS[self.dtype] // 8

    @property
    def scale_block_bytes(self) -> int:
        """Of the scales of a panel's k block that pass through the ring as they are."""
        return ROW_SCALE_BYTES.get(self.dtype, 0) * PANEL_ROWS


@dataclass(frozen=True)
class ProductPlan(RingPlan):
    """Every budget of a CTA.

    Attributes:
        in_features: K.
        out_rows: of an expert's weights in a pair of panels: of gate, and of up, or of down.
        row_tiles: pairs of panels.
        expert_dtype, scale_form: as in `ExpertsConfig`.
        source: of the activations.
        has_shared, has_routed: whether there are tiles of the shared expert, of routed ones.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
    """

    in_features: int
    out_rows: int
    row_tiles: int
    expert_dtype: str
    scale_form: str
    tiling: Tiling
    source: Source
    has_shared: bool
    has_routed: bool
    lanes_per_warp: int = 1
    shared_dtype: str = "fp8"

    @classmethod
    def gate_and_up(
        cls,
        config: ExpertsConfig,
        tiling: Tiling,
        is_shared: bool,
        lanes_per_warp: int,
        source: Source = Source.TOKENS,
    ) -> ProductPlan:
        """Of w1 and w3, of the shared expert or of all routed ones: a tile has as many rows of
        each."""
        tiling = tiling.alone if is_shared else tiling
        return cls(
            config.hidden, config.inner, config.inner // (PANEL_ROWS * tiling.warpgroups),
            config.expert_dtype, config.scale_form, tiling, source, is_shared,
            not is_shared, lanes_per_warp, config.shared_dtype,
        )  # fmt: skip

    @classmethod
    def down(cls, config: ExpertsConfig, tiling: Tiling, lanes_per_warp: int) -> ProductPlan:
        """Of w2, of all experts."""
        source = Source.CODES if tiling.rounds else Source.BFLOAT16
        return cls(
            config.inner, config.hidden, config.hidden // (2 * PANEL_ROWS * tiling.warpgroups),
            config.expert_dtype, config.scale_form, tiling, source, True, True, lanes_per_warp,
            config.shared_dtype,
        )  # fmt: skip

    def scales_rows_last(self, kind: Kind) -> bool:
        """Whether the scale of a row of FP4 is that of all its k blocks, so that it multiplies the
        tile's sums: a power of two, of a product or of their sum."""
        return kind.dtype == "fp4" and self.scale_form == "row_packed"

    @property
    def k_blocks(self) -> int:
        return self.in_features // K_BLOCK

    @property
    def tile_rows(self) -> int:
        """Of a product, of one weight or of gate and up together."""
        return 2 * self.panels * PANEL_ROWS

    @property
    def panels(self) -> int:
        """Panels of a tile that are the rows g of fragments, and as many the rows g + 8."""
        return self.tiling.warpgroups

    @property
    def routed(self) -> tuple[Kind, ...]:
        """By their columns, ascending: a tile takes the first that holds its tokens."""
        tokens, is_packed = self.tiling.tokens, self.scale_form in FOLDED_FORMS
        columns = (tokens // 2, tokens) if tokens > FEWEST_COLUMNS else (tokens,)
        return tuple(self._kind(self.expert_dtype, count, is_packed) for count in columns)

    @property
    def shared(self) -> Kind:
        return self._kind(self.shared_dtype, self.tiling.shared_tokens, True)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of the launch."""
        shared = (self.shared,) if self.has_shared else ()
        return (*self.routed, *shared) if self.has_routed else shared

    @property
    def ring_kinds(self) -> tuple[Kind, ...]:
        """What the ring has room for: products that share a launch share it."""
        return (*self.routed, self.shared) if self.tiling.is_joint else self.kinds

    def _kind(self, dtype: str, tokens: int, is_packed: bool) -> Kind:
        blocks = max(PANEL_BLOCKS * 4 // WEIGHT_BITS[dtype] // min(self.panels, 2), 1)
        if self.has_long_stages:
            blocks *= 2
        return Kind(dtype, tokens, blocks, -(-self.k_blocks // blocks), is_packed)

    @property
    def has_long_stages(self) -> bool:
        """Whether stages are half as many and twice as long: of few tokens alone in a launch the
        shared expert's products are a chain of latencies, which more of them under way shorten."""
        is_alone = self.has_shared and not self.has_routed
        is_few = self.tiling.shared_tokens <= MOST_LONG
        return is_alone and is_few and self.shared_dtype == "fp8"

    @property
    def is_gated(self) -> bool:
        """Whether the rows are those of gate and of up."""
        return self.source in (Source.TOKENS, Source.BFLOAT16_TOKENS)

    @property
    def rounds(self) -> bool:
        """Whether it leaves codes, and scales of each 128 channels."""
        return self.is_gated and self.largest > 0

    @property
    def largest(self) -> int:
        """Magnitudes of a tile's columns, one of each warp of consumers, where h is rounded."""
        is_rounded = self.has_routed and self.tiling.rounds
        return self.tiling.tokens * self.warps["consumers"].count * is_rounded

    @property
    def quantizes(self) -> bool:
        """Whether activations become codes on their way into the ring."""
        return self.source in (Source.BFLOAT16, Source.BFLOAT16_TOKENS)

    @property
    def has_copies(self) -> bool:
        """Whether activations are copied as they lie, by this product or by the other one of the
        launch: the copies of each lane then arrive, too."""
        has_bf16 = any(kind.is_bf16 for kind in self.kinds)
        return not self.quantizes or self.tiling.is_joint or has_bf16

    # ---- a stage ----

    def stage_bytes(self, kind: Kind) -> int:
        """Bytes that copies announce for each k block of a stage: weights and their scales."""
        return 2 * self.panels * (kind.block_bytes + kind.scale_block_bytes)

    @property
    def x_rows(self) -> int:
        """Rows of 128 bytes of a stage."""
        return max(kind.blocks * kind.x_rows for kind in self.ring_kinds)

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return 2 * self.panels * max(kind.blocks * kind.block_bytes for kind in self.ring_kinds)

    @property
    def scale_bytes(self) -> int:
        """Of a stage, of FP4 weights."""
        blocks = max(kind.blocks * kind.scale_block_bytes for kind in self.ring_kinds)
        return 2 * self.panels * blocks

    @property
    def block_scales(self) -> int:
        """FP8 scales of a stage: one for each k block and panel."""
        return 2 * max(kind.blocks for kind in self.ring_kinds)

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(
            consumers=WARPGROUP * self.tiling.warpgroups, load=1, activations=ACTIVATION_WARPS
        )

    @property
    def ctas_per_sm(self) -> int:
        return self.tiling.ctas_per_sm

    @property
    def most_stages(self) -> int:
        return self.tiling.stages // 2 if self.has_long_stages else self.tiling.stages

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        return (
            # [stage, panel, k block of the stage]
            Buffer("weight", "Uint8", stages * self.weight_bytes, 1024),
            Buffer("x", "Float8E4M3FN", stages * self.x_rows * K_BLOCK, 1024),
            Buffer("scale", "Uint8", max(stages * self.scale_bytes, 128), 128),
            # [stage, k block of the stage, token]
            Buffer("x_scale", "Float32", stages * self.x_rows, 16),
            # [stage, k block of the stage, panel], of FP8 weights
            Buffer("block_scale", "Float32", stages * self.block_scales, 8),
            *((Buffer("board", "Int32", BOARD_STAGES * BOARD_WORDS, 16),) * self.tiling.is_joint),
            # [column, warp of consumers]
            *((Buffer("largest", "Float32", self.largest, 16),) * (self.largest > 0)),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        copies = (Arrival("activations", Arrive.THREAD, warps=1),) if self.has_copies else ()
        edge = Edge(
            "ring", "k blocks of a weight tile, of its tokens",
            (Arrival("load", Arrive.TMA), Arrival("activations", Arrive.WARP, warps=1), *copies),
            (Arrival("consumers", Arrive.WARP),),
            stages,
        )  # fmt: skip
        if not self.tiling.is_joint:
            return BarrierGraph(self.warps, (edge,), self.lanes_per_warp)
        board = Edge(
            "board", "the next tile",
            (Arrival("load", Arrive.WARP),),
            (Arrival("consumers", Arrive.WARP), Arrival("activations", Arrive.WARP)),
            BOARD_STAGES,
        )  # fmt: skip
        return BarrierGraph(self.warps, (edge, board), self.lanes_per_warp)

    def __post_init__(self) -> None:
        tiling = self.tiling
        assert all(kind.tokens % FEWEST_COLUMNS == 0 for kind in self.kinds), tiling
        assert all(self.x_rows % kind.x_rows == 0 for kind in self.kinds), tiling
        assert not self.rounds or (tiling.is_joint and self.panels * PANEL_ROWS == K_BLOCK), tiling
        assert self.stages >= ACTIVATION_WARPS, (
            f"{tiling}: K {self.in_features} has {self.stages} stages"
        )

    def __str__(self) -> str:
        tiling = self.tiling
        return "\n".join((
            f"K {self.in_features}, {tiling.ctas_per_sm} CTAs an SM, tiles of",
            *(
                f"           {self.tile_rows} rows {kind.dtype} x {kind.tokens} tokens"
                for kind in self.kinds
            ),
            f"warps      {self.warps}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


def tilings(config: ExpertsConfig) -> tuple[Tiling, ...]:
    """Tilings of the kernels, by the tokens of a tile."""
    if config.expert_dtype in BF16_DTYPES:
        return bf16_tilings(config)
    # Tiles of 256 rows: activations are loaded once for all of them, and groups of h are whole.
    has_tall = config.hidden % (8 * PANEL_ROWS) == 0
    tall = {"warpgroups": 4, "ctas_per_sm": 1, "stages": 6} if has_tall else {}
    return (
        Tiling(8, 8, 8, warpgroups=1, ctas_per_sm=3, stages=3),
        Tiling(8, 8, 8, stages=3, is_joint=True),
        Tiling(8, 32, 32, is_joint=True, **tall),
        Tiling(16, 64, 32, rounds=has_tall, is_joint=True, reads_once=False, **tall),
        # Decoding FP4 keeps two CTAs an SM busy, as long as accumulators leave them registers.
        *([_wide(32, ctas_per_sm=2)] if config.expert_dtype == "fp4" else []),
        _wide(64),
        _wide(128),
    )


def _wide(tokens: int, ctas_per_sm: int = 1) -> Tiling:
    """Of tiles whose tokens a launch before gathers."""
    return Tiling(
        tokens, tokens, tokens, ctas_per_sm=ctas_per_sm, stages=8, reads_once=False, is_wide=True,
    )  # fmt: skip


def bf16_tilings(config: ExpertsConfig) -> tuple[Tiling, ...]:
    """Those of products in bf16: a tile of as many tokens has twice the bytes of activations, and
    sums of a whole K, which nothing promotes."""
    is_bf16 = config.expert_dtype == "bfloat16"
    ctas_per_sm = 3 if is_bf16 else 2  # as stages fit
    tokens, shared_tokens = (32, 32) if is_bf16 else (64, 64)
    # A ring has a stage for each warp that copies tokens: beside a shared expert of bf16 those of
    # two CTAs an SM have room for 16 tokens.
    alone = 16 if config.shared_dtype == "bfloat16" else 32
    return (
        Tiling(8, 8, 8, warpgroups=1, ctas_per_sm=ctas_per_sm, is_joint=True),
        Tiling(8, alone, alone, is_joint=True),
        Tiling(tokens, 64, shared_tokens, ctas_per_sm=1, reads_once=False),
    )


# Of bf16 weights, then of NVFP4, whose decoding a tile of more tokens does not make up for.
MOST_BF16_TOKENS = {"bfloat16": (1, 128), "nvfp4": (1, 256)}
# Most tokens of a launch for each of the first tilings.
MOST_TOKENS = (1, 8, 128)
# Most tokens of an expert, in the mean, for each of the others but the last: by times of Flash and
# Pro, see docs/design/experts.md, "Many tokens of an expert".
MOST_MEAN_TOKENS = {"fp4": (10.5, 24, 54), "fp8": (6, 24)}
# Tiles of gate and up of one token that the CTAs of a Hopper GPU take in one turn: more of them are
# better off in the launch of both products, where CTAs that are ahead take what is left.
ONE_TURN = 396


def choose(config: ExpertsConfig, tokens: int, experts: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens of a layer of so many experts."""
    if config.expert_dtype in BF16_DTYPES:
        return bisect_left(MOST_BF16_TOKENS[config.expert_dtype], tokens)
    if tokens == 1 and config.top_k * (config.inner // PANEL_ROWS) > ONE_TURN:
        return 1
    for index, most in enumerate(MOST_TOKENS):
        if tokens <= most:
            return index
    mean = tokens * config.top_k / experts
    return len(MOST_TOKENS) + bisect_left(MOST_MEAN_TOKENS[config.expert_dtype], mean)
