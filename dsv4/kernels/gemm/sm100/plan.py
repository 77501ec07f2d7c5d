"""Plans of Blackwell's linears: order of the sums, tilings, and every budget of a CTA.

Plain Python: `print(LinearPlan(4096, 4, Tiling(16, 4)))` shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from dsv4.arch import SM_100A, Arch
from dsv4.kernels.gemm.config import STEP_BYTES, Fp8LinearConfig, Kind
from dsv4.kernels.gemm.epilogues import ArgMax, Epilogue, IndexRounding, Rounding
from dsv4.kernels.gemm.grouped_config import GroupedLinearConfig
from dsv4.kernels.gemm.plan import STAGED_ROW
from dsv4.kernels.kit.plan import (
    TMEM_COLUMNS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    TmemPlan,
    Warps,
)
from dsv4.kernels.kit.ring_plan import RingPlan

ROWS = 128  # of the weight in a tile: M of a block-scaled product, and rows of a weight's scale
MOST_SLICES = 8  # CTAs of a cluster, which every device has room for
MIN_SLICE_BLOCKS = 4
QUANTIZED_TOKENS, FEW_TOKENS, MANY_TOKENS, MOST_TOKENS = 8, 16, 64, 128  # of the tilings
WIDE_TOKENS = 256  # where one CTA sums all of K
MOST_COLUMNS = 32  # of sums that are in registers at once, and stored
LEAST_PLAIN_COLUMNS = 16  # of a product of 128 rows of bf16
EPILOGUE_WARPS = 4
# Scales that the tensor core reads, a copy's unit: 32 lanes of 4 words, of which word w of lane l
# has those of row 32 w + l.
ATOM_ROWS, ATOM_WORDS = 128, 128
MIN_STAGES = 3
SUM_STAGES = 2  # tiles of sums: one is stored while the next one is made
BLOCK_STAGES = 4  # sums of single k blocks
LOADS_AHEAD = 4  # k blocks whose scales, and values that are quantised, are on their way
ALL_WARPS_TMEM = 256  # columns of a CTA where two share an SM
L2_BYTES = 64  # that reach an SM in a cycle: what bounds launches of many tokens (see `cost`)
EXCHANGE_CYCLES = 20  # of a token's partial sums, between the CTAs of a cluster


class NamedBarriers(IntEnum):
    """Hardware barriers of a CTA; 0 is that of `__syncthreads`."""

    TMEM_ALLOCATED = 1  # the warps that use TMEM
    TMEM_UNUSED = 2  # the warps that read sums
    MAXIMA_THERE = 3  # the same
    BEST_THERE = 4  # the same
    HEADS_THERE = 5  # the same


@dataclass(frozen=True)
class Tiling:
    """Division of the product by a launch. No bit of a result depends on it.

    Attributes:
        tokens: of a token tile: N of the products.
        cluster: CTAs that share the slices of a tile.
        is_streamed: whether codes of activations pass through the ring beside the weights. Else
            bf16 ones become codes on their way to shared memory.
        terms: e4m3 codes of an activation: 1, or 2 for bf16 ones that nothing rounds (see
            `gemm.quantize`), each with products of its own.
    """

    tokens: int
    cluster: int
    is_streamed: bool = True
    terms: int = 1

    @property
    def ctas_per_sm(self) -> int:
        """Two CTAs fit an SM, so that the next launch's fill their rings while this one ends."""
        return 2 if self.tokens <= FEW_TOKENS else 1


@dataclass(frozen=True)
class LinearPlan(RingPlan):
    """Every budget of a CTA.

    Attributes:
        in_features: K.
        slices: of K: see `num_slices`.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
        is_promoted: whether the weight's scales are fp32, which the tensor core does not take: the
            sum of a k block is then multiplied with them in registers.
        kind: of the weights.
        group_rows: rows of the weight that are multiplied with the same K columns of x, those after
            them with the next K; 0: all of them.
        epilogues: of each weight, where any has one.
    """

    in_features: int
    slices: int
    tiling: Tiling
    lanes_per_warp: int = 1
    is_promoted: bool = False
    kind: Kind = Kind.FP8
    group_rows: int = 0
    epilogues: tuple[Epilogue | None, ...] = ()

    arch = SM_100A

    # ---- K ----

    @property
    def own_slices(self) -> int:
        """Slices of a CTA, one after the other."""
        return self.slices // self.tiling.cluster

    @property
    def row_blocks(self) -> int:
        """k blocks of a row: a swizzle span each, a group of scales where there are scales."""
        return self.in_features // self.kind.step

    @property
    def cta_blocks(self) -> int:
        """k blocks of a CTA: steps of a tile."""
        return self.row_blocks // self.tiling.cluster

    @property
    def slice_blocks(self) -> int:
        return self.row_blocks // self.slices

    # ---- tiles ----

    @property
    def rows(self) -> int:
        """Of the weight in a row tile."""
        return ROWS

    @property
    def tokens(self) -> int:
        return self.tiling.tokens

    @property
    def is_quantized(self) -> bool:
        """Whether products have scales."""
        return self.kind is Kind.FP8

    @property
    def has_streamed_x(self) -> bool:
        """Whether activations pass through the ring by TMA: bf16 ones of bf16 weights always."""
        return self.tiling.is_streamed or not self.is_quantized

    @property
    def rounds_output(self) -> bool:
        """Whether outputs become codes, whose scale needs all rows of a tile."""
        return self._has(Rounding)

    @property
    def rounds_heads(self) -> bool:
        """Whether those of a weight are index heads."""
        return self._has(IndexRounding)

    @property
    def finds_best(self) -> bool:
        """Whether each token's largest output is looked for."""
        return self._has(ArgMax)

    def _has(self, kind: type) -> bool:
        return any(isinstance(epilogue, kind) for epilogue in self.epilogues)

    @property
    def ctas_per_sm(self) -> int:
        return self.tiling.ctas_per_sm

    @property
    def filler(self) -> str:
        """Role that fills the scales of a stage; where there are none, its warps are those of the
        launch's other weights."""
        if not self.is_quantized:
            return "idle"
        return "scales" if self.tiling.is_streamed else "activations"

    @property
    def filler_warps(self) -> int:
        return 1 if self.tiling.is_streamed else 4

    @property
    def columns(self) -> int:
        """Of a product: tokens, and of bf16 those of the next tile where these are too few."""
        return self.tokens if self.is_quantized else max(self.tokens, LEAST_PLAIN_COLUMNS)

    @property
    def token_words(self) -> int:
        """Scales of a lane, of 32 tokens each."""
        return -(-self.tokens // 32)

    @property
    def token_atoms(self) -> int:
        """Units of scales of a token tile."""
        return -(-self.tokens // ATOM_ROWS)

    @property
    def own_tokens(self) -> int:
        """Tokens of a tile whose parts a CTA adds, and whose outputs it stores."""
        return self.tokens // self.tiling.cluster

    @property
    def stored_tokens(self) -> int:
        """Own tokens of a row that are in registers at once."""
        return min(self.own_tokens, MOST_COLUMNS)

    @property
    def vector(self) -> int:
        """Tokens of a row that are sent together."""
        return min(self.own_tokens, 4)

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return ROWS * STEP_BYTES

    @property
    def x_rows(self) -> int:
        """Of a stage: with two terms those of each of eight tokens by turns."""
        return self.columns * self.tiling.terms

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.x_rows * STEP_BYTES

    @property
    def loaded_bytes(self) -> int:
        """Of a stage, by TMA."""
        return self.weight_bytes + (self.x_bytes if self.has_streamed_x else 0)

    @property
    def partial_bytes(self) -> int:
        """Partial sums that a CTA adds of a tile."""
        return self.tiling.cluster * self.own_tokens * ROWS * 4 if self.tiling.cluster > 1 else 0

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        """Warp w reaches TMEM lanes 32 (w % 4) to 32 (w % 4) + 31: the epilogue is a warpgroup."""
        filler = {self.filler: self.filler_warps}
        if self.tiling.is_streamed:
            return Warps.of(epilogue=EPILOGUE_WARPS, load=1, mma=1, **filler)
        return Warps.of(epilogue=EPILOGUE_WARPS, **filler, load=1, mma=1)

    @property
    def tmem_users(self) -> int:
        """Threads that wait for the address of TMEM."""
        return self.warps["epilogue"].threads + self.warps["mma"].threads

    @property
    def registers(self) -> Registers:
        """As launched."""
        return Registers.of(self.warps)

    @property
    def sum_columns(self) -> int:
        """TMEM columns of a stage of sums: of all slices of the CTA, or of a k block."""
        return self.columns * (1 if self.is_promoted else self.own_slices)

    @property
    def sum_stages(self) -> int:
        scales = sum(columns for _, columns in self._scale_regions)
        columns = TMEM_COLUMNS if self.ctas_per_sm == 1 else ALL_WARPS_TMEM
        most = BLOCK_STAGES if self.is_promoted else SUM_STAGES
        return min(most, (columns - scales) // self.sum_columns)

    @property
    def tmem(self) -> TmemPlan:
        """A lane is a row of the weight, a column a token; scales lie four times, once in each
        quarter of the lanes."""
        sums = ("sums", self.sum_stages * self.sum_columns)
        return TmemPlan((sums, *self._scale_regions))

    @property
    def _scale_regions(self) -> tuple[tuple[str, int], ...]:
        if not self.is_quantized:
            return ()
        columns = ATOM_ROWS // 32
        return ("weight_scales", columns), ("x_scales", self.token_atoms * columns)

    @property
    def _epilogue_buffers(self) -> tuple[Buffer, ...]:
        if self.rounds_output:
            # [turn, warp, token]
            return (Buffer("maxima", "Int32", 2 * EPILOGUE_WARPS * self.stored_tokens, 16),)
        if self.rounds_heads:
            # [token, row], padded
            return (Buffer("staged", "BFloat16", self.stored_tokens * STAGED_ROW, 16),)
        if self.finds_best:
            # [warp, token]
            return (Buffer("best", "Int64", EPILOGUE_WARPS * self.tokens, 16),)
        return ()

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        scales = (
            Buffer("weight_scales", "Int32", stages * ATOM_WORDS, 128),
            Buffer("x_scales", "Int32", stages * self.token_atoms * ATOM_WORDS, 128),
        )
        partials = (Buffer("partials", "Float32", self.partial_bytes // 4, 16),)
        return (
            # Bytes, of bf16, too.
            Buffer("weight", "Float8E4M3FN", stages * self.weight_bytes, 1024),
            Buffer("x", "Float8E4M3FN", stages * self.x_bytes, 1024),
            *(scales if self.is_quantized else ()),
            *(partials if self.partial_bytes else ()),
            *self._epilogue_buffers,
            Buffer("tmem_address", "Int32", 1),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        mma, epilogue = Arrival("mma", Arrive.MMA), Arrival("epilogue", Arrive.WARP)
        fill = [Arrival("load", Arrive.TMA)]
        if self.is_quantized:
            fill.append(Arrival(self.filler, Arrive.WARP))
        edges = [
            Edge(
                "ring", "k block of weights and activations, and their scales",
                tuple(fill), (mma,), stages, self.loaded_bytes,
            ),
            Edge("sums", "sums in TMEM", (mma,), (epilogue,), self.sum_stages),
        ]  # fmt: skip
        if self.partial_bytes:
            everywhere = Arrival("epilogue", Arrive.WARP, ctas=self.tiling.cluster)
            # One thread expects the bytes that all CTAs of the cluster store asynchronously.
            edges.append(
                Edge(
                    "partials", "partial sums of the own tokens",
                    (Arrival("epilogue", Arrive.TMA),), (everywhere,), tx_bytes=self.partial_bytes,
                )
            )  # fmt: skip
        return BarrierGraph(self.warps, tuple(edges), self.lanes_per_warp)

    def __post_init__(self) -> None:
        tiling, blocks = self.tiling, self.row_blocks
        assert self.own_slices * tiling.cluster == self.slices, f"{tiling}: {self.slices} slices"
        assert self.slice_blocks * self.slices == blocks, f"{self.slices} slices of {blocks} blocks"
        assert not self.is_promoted or self.own_slices == 1, f"{tiling}: promoted slices"
        assert self.own_tokens * tiling.cluster == self.tokens, f"{tiling}: tokens of a CTA"
        assert tiling.is_streamed or self.tokens == QUANTIZED_TOKENS, f"{tiling}: too many"
        assert self.group_rows % ROWS == 0, f"groups of {self.group_rows} rows"
        assert self.is_quantized or not self.is_promoted, "scales of bf16"
        assert not self.finds_best or tiling.cluster == 1, f"{tiling}: best rows of a cluster"
        assert self.sum_stages >= 1, f"TMEM: {self.sum_columns} columns of sums, and scales"
        assert self.stages >= MIN_STAGES, f"{tiling}: {self.stages} stages fit"
        columns = TMEM_COLUMNS // self.ctas_per_sm
        assert self.tmem.allocated_columns <= columns, f"TMEM: {self.tmem} of {columns}"

    def __str__(self) -> str:
        return "\n".join((
            f"{self.kind.name}, K {self.in_features} in {self.slices} slices, "
            f"{ROWS} rows x {self.tokens} tokens"
            f"{' of two codes' if self.tiling.terms > 1 else ''}, "
            f"{self.tiling.cluster} CTAs a tile, {self.ctas_per_sm} an SM",
            f"warps      {self.warps}; registers {self.registers}",
            f"TMEM       {self.tmem}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


# ---- order of the sums, tilings, and which one a launch takes ------------------------------------


def num_slices(config: Fp8LinearConfig | GroupedLinearConfig, arch: Arch = SM_100A) -> int:
    """Slices of K that are summed by themselves, then added as a balanced binary tree: a power of
    two.

    Given by the weight's shape: so many that few rows occupy the GPU, too, and one where there are
    rows enough. The bits of a result depend on neither the number of tokens nor the tiling.
    """
    return slices_of(-(-config.out_features // ROWS), config.k_blocks, arch.num_sms)


def slices_of(row_tiles: int, k_blocks: int, ctas: int) -> int:
    """As many as double row tiles up to so many CTAs, and leave a slice some k blocks."""
    slices = 1
    while slices < MOST_SLICES and 2 * slices * row_tiles <= ctas:
        if k_blocks % (2 * slices) or k_blocks // (2 * slices) < MIN_SLICE_BLOCKS:
            break
        slices *= 2
    return slices


def representative(config: Fp8LinearConfig) -> Fp8LinearConfig:
    """The configuration that stands for all with the same kernels: numbers of rows by
    `num_slices`."""
    rows = SM_100A.num_sms // num_slices(config) * ROWS
    if config.head_epilogue is not None:
        rows -= rows % config.head_epilogue.head_dim
        if rows == 0 or num_slices(replace(config, out_features=rows)) != num_slices(config):
            return config
    return replace(config, out_features=rows)


def tilings(config: Fp8LinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels, by tokens."""
    return tilings_of(num_slices(config), config.quantizes, is_promoted(config))


def tilings_of(
    slices: int, quantizes: bool, is_promoted: bool, terms: int = 1
) -> tuple[Tiling, ...]:
    """Tilings of so many slices, by tokens.

    Args:
        quantizes: whether there is one that makes codes of bf16 activations.
        is_promoted, terms: as in `LinearPlan` and `Tiling`.
    """
    found = [Tiling(QUANTIZED_TOKENS, slices, False, terms)] if quantizes else []
    found += [
        Tiling(tokens, slices, terms=terms) for tokens in (FEW_TOKENS, MANY_TOKENS, MOST_TOKENS)
    ]
    if not is_promoted and slices > 1:
        # A CTA's own slices leave their partial sums in TMEM: fewer are exchanged.
        found.append(Tiling(MOST_TOKENS, slices // 2, terms=terms))
    elif not is_promoted and terms == 1:
        found.append(Tiling(WIDE_TOKENS, 1))
    return tuple(found)


def is_promoted(config: Fp8LinearConfig | GroupedLinearConfig) -> bool:
    """As in `LinearPlan`."""
    return config.scale_dtype == "float32"


def plan_of(config: Fp8LinearConfig, tiling: Tiling, lanes_per_warp: int = 1) -> LinearPlan:
    """Plan of one of a configuration's tilings."""
    epilogues = (config.head_epilogue,) if config.head_epilogue else ()
    return LinearPlan(
        config.in_features, num_slices(config), tiling, lanes_per_warp, is_promoted(config),
        epilogues=epilogues,
    )  # fmt: skip


def choose(config: Fp8LinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    return cheapest(tilings(config), tokens, lambda tiling: cost(config, tiling, tokens, num_sms))


def cheapest(found: Sequence[Tiling], tokens: int, cost: Callable[[Tiling], float]) -> int:
    """Index of the smallest tiling that takes so many tokens at once, else of the one with the
    least `cost`."""
    for index, tiling in enumerate(found):
        if tokens <= tiling.tokens <= MANY_TOKENS:
            return index
    many = [index for index, tiling in enumerate(found) if tiling.tokens >= MANY_TOKENS]
    return min(many, key=lambda index: cost(found[index]))


def cost(
    config: Fp8LinearConfig | GroupedLinearConfig, tiling: Tiling, tokens: int, num_sms: int
) -> float:
    """Cycles of a launch by what its CTAs read and exchange; no B200 has timed one."""
    row_tiles, token_tiles = -(-config.out_features // ROWS), -(-tokens // tiling.tokens)
    waves = -(-row_tiles * token_tiles * tiling.cluster // num_sms)
    blocks = config.k_blocks // tiling.cluster
    exchange = EXCHANGE_CYCLES * tiling.tokens if tiling.cluster > 1 else 0
    rows = ROWS + tiling.tokens * tiling.terms
    return waves * (blocks * rows * STEP_BYTES / L2_BYTES + exchange)
