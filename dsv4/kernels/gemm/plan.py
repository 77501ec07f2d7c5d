"""Plans of linears: which tiling a launch takes, and every budget of a tiling's CTA.

Plain Python: `print(LinearPlan(4096, Tiling(8, False, 2)))` shows one. The order of the sums is
`config.num_slices`; nothing here changes a bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsv4.arch import SM_90A, Arch
from dsv4.kernels.gemm.config import K_BLOCK, STEP_BYTES, Fp8LinearConfig, Kind, num_slices
from dsv4.kernels.gemm.epilogues import (
    ROUNDINGS,
    ArgMax,
    Epilogue,
    HeadRotation,
    IndexRounding,
)
from dsv4.kernels.kit.plan import (
    GPC_SMS,
    Arrival,
    Arrive,
    BarrierGraph,
    Buffer,
    Edge,
    Registers,
    Warps,
)
from dsv4.kernels.kit.ring_plan import RingPlan

M_TILE = 64  # rows of a wgmma
UNIT_ROWS = 16  # of a warp's accumulators
LANE_VALUES = 4  # that a lane holds of UNIT_ROWS rows and 8 columns
# Bytes of the first filling of a CTA's rings that are under way at a time, by CTAs of an SM. All at
# once stand in L2's queues before what the launches before still wait for: beside 192 KB an SM a
# load that L2 holds takes 3 us in place of 0.15, beside 48 KB 0.2, at 95 % of the rate of memory.
FILLING_BYTES = {1: 48 << 10, 2: 32 << 10}
# bf16 outputs of a token that wait to be rounded: 16 bytes more than K_BLOCK, so that neither the
# lanes that write four tokens nor those that read one meet in a bank.
STAGED_ROW = K_BLOCK + 8
SPILL_GRANULE = 512  # fp32 elements: so both halves of a buffer are aligned as TMA swizzles them
CONSUMER_WARPS = 8
MIN_STAGES = 2
SMALL_BUFFERS = 8 << 10  # bytes of partial sums, scales and mbarriers of few tokens, at most
# k blocks whose products a warpgroup of few tokens has under way, and those of a run, which is
# written out. Three or four under way are no faster on an H200, and stages are empty later.
MOST_UNDER_WAY, MOST_RUN = 2, 8
RESIDENT_TOKENS, FEW_TOKENS, MANY_TOKENS, MOST_TOKENS = 8, 16, 64, 128  # of the tilings
SHORT_ROWS = 32  # of a copy of activations where a tile lacks some, at most
# Levels of the stack of sums that MOST_TOKENS leave registers for, beside a block's products; a
# deeper one waits in shared memory.
LEVELS_IN_REGISTERS = 2
# Microseconds of an H200, fitted to every tiling of 20 linears of Flash and Pro with 64 to 4,096
# tokens: of a k block, of the end of a tile, of an exchange of partial sums among twice as many
# CTAs, of a launch whose CTAs leave no room for those of the next one.
BLOCK_TIME = {MANY_TOKENS: 0.455, MOST_TOKENS: 0.47}
TILE_TIME, EDGE_TIME = 1.4, 1.0
EXCHANGE_TIME = {MANY_TOKENS: 0.65, MOST_TOKENS: 2.2}
L2_RATE = 4.83e6  # bytes a microsecond
SHARING = 2  # CTAs that share activations: L2 hands out less than two tiles a k block ask for
BAND_BYTES = 4096  # of a row of weights, with the most token tiles in a band
# Where one CTA takes an SM, clusters of more than two leave SMs without one: 18 SMs of a GPC hold
# four of four, and 32 clusters of four run in two turns.
USABLE_BY_CLUSTERS = 0.75


@dataclass(frozen=True)
class Tiling:
    """Division of the product by a launch. No bit of a result depends on it.

    Attributes:
        tokens: of a token tile: columns of the products.
        is_streamed: whether e4m3 activations pass through the ring beside 128-row tiles of the
            weight. Else bf16 ones are quantised into shared memory once for all 64-row tiles.
            Those of bf16 weights pass through the ring either way.
        cluster: CTAs that share the slices of a tile.
        sharing: CTAs with row tiles of their own that load the same activations once, by multicast.
        is_light: whether two CTAs of many tokens fit an SM: each sums one slice.
        is_deep: whether a CTA of few tokens has the shared memory of an SM.
        terms: e4m3 codes of an activation, each a column of the products: 1, or 2 for bf16 ones
            that nothing rounds (see `quantize`).
    """

    tokens: int
    is_streamed: bool
    cluster: int
    sharing: int = 1
    is_light: bool = False
    terms: int = 1
    is_deep: bool = False

    @property
    def columns(self) -> int:
        """Of the products."""
        return self.tokens * self.terms

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster * self.sharing

    @property
    def is_wide(self) -> bool:
        """Whether tensor cores are the bound: then registers are dealt to the consumers, and the
        scales of the activations pass through the ring, too."""
        return self.columns == MOST_TOKENS

    @property
    def ctas_per_sm(self) -> int:
        """Two CTAs fit an SM, so that the next launch's fill their rings while this one ends; the
        accumulators of many tokens take the registers of both."""
        return 2 if (self.tokens <= FEW_TOKENS and not self.is_deep) or self.is_light else 1

    @property
    def rows(self) -> int:
        """Of the weight in a row tile."""
        return 2 * M_TILE if self.is_streamed else M_TILE


@dataclass(frozen=True)
class LinearPlan(RingPlan):
    """Every budget of a CTA.

    Attributes:
        in_features: K.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
        kind: of the weights.
        group_rows: rows of the weight that are multiplied with the same K columns of x, those after
            them with the next K; 0: all of them.
        epilogues: of each weight, where any has one.
    """

    in_features: int
    tiling: Tiling
    lanes_per_warp: int = 1
    kind: Kind = Kind.FP8
    group_rows: int = 0
    epilogues: tuple[Epilogue | None, ...] = ()

    # ---- K ----

    @property
    def slices(self) -> int:
        return num_slices(self.in_features)

    @property
    def rings(self) -> int:
        """Streamed, both warpgroups consume one ring, 64 rows each. Resident, each has a ring of
        its own: half of the CTA's slices of the same 64 rows."""
        return 1 if self.tiling.is_streamed else 2

    @property
    def parts(self) -> int:
        """Partial sums of an output element."""
        return self.tiling.cluster * self.rings

    @property
    def own_slices(self) -> int:
        """Slices of a warpgroup, one after the other."""
        return self.slices // self.parts

    @property
    def row_blocks(self) -> int:
        """k blocks of a row: a swizzle span each, a group of scales where there are scales."""
        return self.in_features // self.kind.step

    @property
    def slice_blocks(self) -> int:
        return self.row_blocks // self.slices

    @property
    def blocks_under_way(self) -> int:
        """k blocks whose products a warpgroup has under way: of few tokens several, since what
        they wait for is a chain of latencies, once the ring is full. Not all stages of a ring:
        nothing would be on its way meanwhile."""
        return min(MOST_UNDER_WAY, self.stages - 1) if self.tokens <= FEW_TOKENS else 1

    @property
    def run_blocks(self) -> int:
        """k blocks that follow each other without a pause."""
        return min(MOST_RUN, self.slice_blocks) if self.blocks_under_way > 1 else 1

    @property
    def ring_blocks(self) -> int:
        """k blocks of a tile that pass through a ring: steps of a tile."""
        return self.own_slices * self.slice_blocks

    @property
    def cta_blocks(self) -> int:
        return self.rings * self.ring_blocks

    @property
    def tree(self) -> list[tuple[int, list[int]]]:
        """For each slice of a warpgroup, its level on a stack of sums, and the levels that are then
        added to, each the sum of itself and of the one above."""
        steps, depth = [], 0
        for s in range(1, self.own_slices + 1):
            merges = [depth - 1 - i for i in range((s & -s).bit_length() - 1)]
            steps.append((depth, merges))
            depth += 1 - len(merges)
        return steps

    # ---- tiles ----

    @property
    def rows(self) -> int:
        return self.tiling.rows

    @property
    def tokens(self) -> int:
        return self.tiling.tokens

    @property
    def columns(self) -> int:
        """Of the products: those of the first term and of the second one of eight tokens by
        turns."""
        return self.tiling.columns

    @property
    def column_groups(self) -> int:
        """Groups of eight tokens."""
        return self.tokens // 8

    @property
    def rounds_output(self) -> bool:
        """Whether outputs of a weight become codes, whose scale needs all rows of a tile."""
        return self._has(ROUNDINGS)

    @property
    def rounds_some(self) -> bool:
        """Whether those of another weight do not."""
        return self.rounds_output and not all(isinstance(e, ROUNDINGS) for e in self.epilogues)

    @property
    def finds_best(self) -> bool:
        """Whether each token's largest output is looked for."""
        return self._has(ArgMax)

    def _has(self, kind: type | tuple[type, ...]) -> bool:
        return any(isinstance(epilogue, kind) for epilogue in self.epilogues)

    @property
    def own_units(self) -> int:
        """Units of 16 rows whose parts a CTA adds."""
        return self.rows // UNIT_ROWS // (1 if self.rounds_output else self.tiling.cluster)

    @property
    def own_groups(self) -> int:
        """Groups of eight tokens whose parts a CTA adds: all, or all rows of some."""
        return self.column_groups // (self.tiling.cluster if self.rounds_output else 1)

    @property
    def is_quantized(self) -> bool:
        """Whether products have scales."""
        return self.kind is Kind.FP8

    @property
    def has_streamed_x(self) -> bool:
        """Whether activations pass through the ring."""
        return self.tiling.is_streamed or not self.is_quantized

    @property
    def has_tokens_in_m(self) -> bool:
        """Whether tokens are M of the products, and rows of the weight N: of wide tiles whose k
        blocks are promoted. A thread then reads the scales of one or two tokens for a k block; of
        columns it would be 32, and loads of shared memory starve beside products."""
        return self.tiling.is_wide and self.is_quantized

    @property
    def band(self) -> int:
        """Token tiles that pass a row tile side by side, so that its weights are read once for
        them: as many as leave room in L2 for their activations."""
        return 32 if self.in_features * self.kind.value <= BAND_BYTES else 8

    @property
    def warp_groups(self) -> int:
        """Groups of eight tokens in a warp's sums of 16 rows of the weight, where no other warp has
        a part of them."""
        return 2 // self.tiling.terms if self.has_tokens_in_m else self.column_groups

    @property
    def weight_bytes(self) -> int:
        """Of a ring's stage."""
        return self.rows * STEP_BYTES

    @property
    def x_bytes(self) -> int:
        """Of a ring's stage."""
        return self.columns * STEP_BYTES if self.has_streamed_x else 0

    @property
    def short_rows(self) -> int:
        """Rows of a copy of streamed activations where a tile lacks some."""
        return min(SHORT_ROWS, self.columns // 2)

    def copied_rows(self, rows: int | None) -> int:
        """Rows of a copy of a weight of so many rows; None: that is known at run time."""
        return M_TILE if rows is not None and rows <= M_TILE else self.rows

    @property
    def window(self) -> int:
        """Stages of the first filling of a ring that are under way at a time."""
        return FILLING_BYTES[self.ctas_per_sm] // (self.rings * self.weight_bytes)

    @property
    def signals_weights(self) -> bool:
        """Whether barriers of their own tell when weights of the first filling are there: stages
        are not full before their activations are, for which the launch before must end."""
        return self.has_streamed_x and not self.tiling.is_wide

    @property
    def partial_values(self) -> int:
        """fp32 elements that a CTA adds of a tile."""
        values = self.own_units * self.own_groups * 8 * UNIT_ROWS
        return self.parts * values if self.parts > 1 else 0

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        if self.tiling.is_wide:
            return Warps.of(consumers=CONSUMER_WARPS, load=1, scales=1, idle=2)
        return Warps.of(consumers=CONSUMER_WARPS, load=1)

    @property
    def registers(self) -> Registers:
        """As launched, or most of them for the accumulators of many tokens."""
        if self.tiling.is_wide:
            return Registers.of(self.warps, consumers=224, load=56, scales=56, idle=56)
        return Registers.of(self.warps)

    @property
    def spilled_levels(self) -> int:
        """Levels of the stack of sums that wait in shared memory: those between the first and the
        last one."""
        levels = self.own_slices.bit_length()
        in_registers = LEVELS_IN_REGISTERS * self.tiling.terms
        return max(levels - in_registers, 0) if self.has_tokens_in_m else 0

    @property
    def ctas_per_sm(self) -> int:
        return self.tiling.ctas_per_sm

    @property
    def spill_values(self) -> int:
        """fp32 elements of the spilled levels; an output tile in bf16 takes half of a level. Beside
        such outputs heads that are rounded take their place by turns."""
        tile = self.rows * self.tokens
        staged = tile // 2 if self.stages_output else 0
        if staged and self.rounds_some:
            staged = -(-self.staged_values // 2 // SPILL_GRANULE) * SPILL_GRANULE
        return max(self.spilled_levels * tile, staged)

    @property
    def staged_values(self) -> int:
        """bf16 outputs [token, row] that wait to be rounded, padded."""
        return self.own_groups * 8 * STAGED_ROW

    @property
    def stages_output(self) -> bool:
        """Whether tiles of a bf16 output pass through shared memory, in rows of a token: where
        tokens are M, and where an epilogue works on them there."""
        if self.parts > 1 or (self.rounds_output and not self.rounds_some):
            return False
        is_rotated = self._has(HeadRotation) and self.tokens >= MANY_TOKENS
        return self.has_tokens_in_m or is_rotated

    @property
    def _epilogue_buffers(self) -> tuple[Buffer, ...]:
        if self.rounds_output and not self.stages_output:
            # [token, row], padded
            return (Buffer("staged", "BFloat16", self.staged_values, 16),)
        if self.finds_best:
            # [warp, token]
            return (Buffer("best", "Int64", CONSUMER_WARPS * self.tokens, 16),)
        return ()

    @property
    def _spill_buffers(self) -> tuple[Buffer, ...]:
        if not self.spill_values:
            return ()
        # [warpgroup, level, vector, thread, 4]; or an output tile's rows, on their way.
        return (Buffer("spills", "Float32", self.spill_values, 1024),)

    def _x_tiles(self, stages: int) -> int:
        """[columns, k block] tiles of activations in shared memory."""
        return stages * self.rings if self.has_streamed_x else self.cta_blocks

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        scale_blocks = stages if self.tiling.is_wide else self.cta_blocks
        dtype = "Float8E4M3FN" if self.is_quantized else "BFloat16"
        weights = stages * self.rings * self.rows * self.kind.step
        scales = Buffer("scales", "Float32", scale_blocks * self.tokens, 16)
        return (
            Buffer("weight", dtype, weights, 1024),
            Buffer("x", dtype, self._x_tiles(stages) * self.columns * self.kind.step, 1024),
            # [part, own unit, group of columns, lane, 4]
            Buffer("partials", "Float32", max(self.partial_values, LANE_VALUES), 16),
            # [k block of the CTA, or stage, token]
            *((scales,) if self.is_quantized else ()),
            *self._spill_buffers,
            *self._epilogue_buffers,
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        sharing = self.tiling.sharing
        consumers = Arrival("consumers", Arrive.WARP, CONSUMER_WARPS // self.rings, ctas=sharing)
        producers = [Arrival("load", Arrive.TMA)]
        if self.has_tokens_in_m:
            producers.append(Arrival("scales", Arrive.WARP))
        edges = [
            Edge(
                "ring", "k block of a weight tile, of streamed activations",
                tuple(producers), (consumers,),
                stages * self.rings, self.weight_bytes + self.x_bytes,
            ),
        ]  # fmt: skip
        if self.signals_weights:
            edges.append(
                Edge(
                    "filling", "weights of a stage of the first filling",
                    (Arrival("load", Arrive.TMA),), (Arrival("load", Arrive.LANE),),
                    self.window, self.rings * self.weight_bytes, is_signal=True,
                )
            )  # fmt: skip
        if self.tiling.cluster > 1:
            everywhere = Arrival("consumers", Arrive.WARP, ctas=self.tiling.cluster)
            # One thread expects the bytes that all CTAs of the cluster store asynchronously.
            edges.append(
                Edge(
                    "partials", "partial sums of the own units",
                    (Arrival("consumers", Arrive.TMA),), (everywhere,),
                    tx_bytes=4 * self.partial_values,
                )
            )  # fmt: skip
        return BarrierGraph(self.warps, tuple(edges), self.lanes_per_warp)

    def __post_init__(self) -> None:
        assert self.own_slices * self.parts == self.slices, f"{self.tiling}: {self.slices} slices"
        assert min(self.tiling.cluster, self.tiling.sharing) == 1, self.tiling
        blocks = self.rows // UNIT_ROWS * self.column_groups
        assert self.own_units * self.own_groups * self.tiling.cluster == blocks, self.tiling
        assert not self.rounds_output or self.rows == K_BLOCK, f"{self.tiling}: {self.rows} rows"
        # Parts are exchanged by tokens where outputs are rounded, else by rows.
        assert not self.rounds_some or self.parts == 1, f"{self.tiling}: {self.parts} parts"
        assert self.stages >= MIN_STAGES, f"{self.tiling}: K {self.in_features} does not fit"
        shared = self.rows * self.tiling.sharing  # rows that are multiplied with the same x
        assert self.group_rows % shared == 0, f"{self.tiling}: groups of {self.group_rows} rows"

    def __str__(self) -> str:
        return "\n".join((
            f"{self.kind.name}, K {self.in_features} in {self.slices} slices, "
            f"{self.rows} rows x {self.tokens} "
            f"tokens, {self.tiling.cluster} CTAs a tile, {self.tiling.ctas_per_sm} an SM",
            f"warps      {self.warps}; registers {self.registers}",
            f"SMEM       {self.smem}",
            str(self.barriers),
        ))  # fmt: skip


# ---- which tilings there are, and which one a launch takes ---------------------------------------


def spread(out_features: int, arch: Arch = SM_90A) -> int:
    """CTAs that share a 128-row tile, so that few rows occupy the GPU, too: 1, 2, 4 or 8."""
    row_tiles, ctas = -(-out_features // (2 * M_TILE)), 1
    while ctas < 8 and row_tiles * ctas * 2 <= arch.num_sms:
        ctas *= 2
    return ctas


def most_rows(ctas: int) -> int:
    """Rows of which so many CTAs share each 128-row tile, where that is more than one."""
    return SM_90A.num_sms // ctas * 2 * M_TILE


def representative(config: Fp8LinearConfig) -> Fp8LinearConfig:
    """The configuration that stands for all with the same kernels: numbers of rows by `spread`."""
    rows = most_rows(spread(config.out_features))
    if config.head_epilogue is not None:
        rows -= rows % config.head_epilogue.head_dim
        if rows == 0 or spread(rows) != spread(config.out_features):
            return config
    return replace(config, out_features=rows)


def tilings(config: Fp8LinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels: one for up to 8 tokens where it quantises, one for up
    to 16, for up to 64, and for more, each with the largest clusters first.

    Measured on an H200 with the layers of Flash and Pro, 1 to 256 tokens.
    """
    slices, ctas = num_slices(config.in_features), spread(config.out_features)
    if isinstance(config.head_epilogue, IndexRounding):
        # CTAs that share the slices of a tile have groups of 8 tokens to round.
        ctas = min(ctas, FEW_TOKENS // 8)
    found = []
    if config.quantizes:
        cluster = min(max(ctas // 2, 1), slices // 2)
        tiling = Tiling(RESIDENT_TOKENS, False, cluster)
        while 2 * tiling.cluster < slices and not leaves_ring(config.in_features, tiling):
            tiling = replace(tiling, cluster=2 * tiling.cluster)
        found.append(tiling)
    found.append(Tiling(FEW_TOKENS, True, min(ctas, slices)))
    if ctas > 1:  # else there may be any number of rows
        found = [deepened(tiling, most_rows(ctas) // tiling.rows) for tiling in found]
    clusters = {1: (1,), 2: (2, 1), 4: (2, 1), 8: (4, 2, 1)}[ctas]
    if clusters[0] < slices <= ctas:
        # Clusters of four find no place each unless two of their CTAs fit an SM.
        found.append(Tiling(MANY_TOKENS, True, slices, is_light=True))
    found += [Tiling(MANY_TOKENS, True, cluster) for cluster in clusters if cluster <= slices]
    found += [Tiling(MOST_TOKENS, True, cluster) for cluster in clusters if 1 < cluster <= slices]
    found.append(Tiling(MOST_TOKENS, True, 1, SHARING))
    return tuple(found)


def clusters_at_once(ctas: int, num_sms):
    """Clusters that find a place where each CTA takes an SM: a GPC of 18 SMs holds four of four."""
    if ctas <= 2:
        return num_sms // ctas
    return num_sms // GPC_SMS * (GPC_SMS // ctas)


def deepened(tiling: Tiling, row_tiles: int) -> Tiling:
    """The tiling for weights of so many row tiles: where each cluster has one to take, and SMs to
    itself, rings are as deep as SMs allow, and no SM gets two CTAs while another one has none."""
    is_few = tiling.tokens <= FEW_TOKENS
    is_deep = is_few and row_tiles <= clusters_at_once(tiling.ctas, SM_90A.num_sms)
    return replace(tiling, is_deep=is_deep)


def leaves_ring(in_features: int, tiling: Tiling) -> bool:
    """Whether the resident activations leave room for a ring of three stages: with two, one is
    multiplied while the other one is on its way."""
    blocks = in_features // K_BLOCK // tiling.cluster
    left = SM_90A.smem_per_sm // tiling.ctas_per_sm - blocks * K_BLOCK * tiling.columns
    return left >= 3 * 2 * M_TILE * K_BLOCK + SMALL_BUFFERS


def choose(config: Fp8LinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    return cheapest(tilings(config), tokens, lambda tiling: cost(config, tiling, tokens, num_sms))


def cheapest(found: Sequence[Tiling], tokens: int, cost: Callable[[Tiling], float]) -> int:
    """Index of the smallest tiling that takes so many tokens at once where there is one of few
    tokens, else of the one with the least `cost`."""
    for index, tiling in enumerate(found):
        if tokens <= tiling.tokens <= FEW_TOKENS:
            return index
    many = [index for index, tiling in enumerate(found) if tiling.tokens > FEW_TOKENS]
    return min(many, key=lambda index: cost(found[index]))


def cost(config: Fp8LinearConfig, tiling: Tiling, tokens: int, num_sms: int) -> float:
    """Microseconds of a launch."""
    groups = -(-config.out_features // (tiling.rows * tiling.sharing))
    share = Share(groups, config.k_blocks // tiling.cluster)
    return launch_time(tiling, (share,), tokens, num_sms)


class Share(NamedTuple):
    """Work on one kind of weights.

    Attributes:
        groups: of row tiles, of as many CTAs as share activations.
        blocks: k blocks of a CTA's tile.
    """

    groups: int
    blocks: int


def launch_time(tiling: Tiling, shares: Sequence[Share], tokens: int, num_sms: int) -> float:
    """Microseconds of an H200, but for what all tilings of many tokens take alike: tiles of a CTA
    one after the other, or what CTAs read from L2."""
    token_tiles = -(-tokens // tiling.tokens)
    ctas = [token_tiles * share.groups * tiling.ctas for share in shares]
    blocks = sum(count * share.blocks for count, share in zip(ctas, shares))
    usable = num_sms
    if tiling.ctas > 2 and not tiling.is_light:
        usable = int(num_sms * USABLE_BY_CLUSTERS)
    # Kinds share the clusters out by their blocks, as `streaming` does it.
    turns: float = -(-ctas[0] // usable)
    longest = max(share.blocks for share in shares)
    if len(shares) > 1:
        turns = max(1.0, blocks / (usable * longest))
    tiles = turns * (longest * BLOCK_TIME[tiling.columns] + TILE_TIME)
    read = blocks * K_BLOCK * (tiling.rows + tiling.columns / tiling.sharing)
    exchange = EXCHANGE_TIME[tiling.columns] * (tiling.cluster.bit_length() - 1)
    edge = EDGE_TIME if tiling.ctas_per_sm == 1 else 0.0
    return max(tiles, read / L2_RATE) + exchange + edge
