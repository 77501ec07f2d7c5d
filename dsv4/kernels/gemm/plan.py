"""Plans of the FP8 linear: which tiling a launch takes, and every budget of a tiling's CTA.

Plain Python: `print(LinearPlan(4096, Tiling(8, False, 2)))` shows one. The order of the sums is
`config.num_slices`; nothing here changes a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsv4.arch import SM_90A, Arch
from dsv4.kernels.gemm.config import K_BLOCK, Fp8LinearConfig, num_slices
from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, SmemPlan, Warps

M_TILE = 64  # rows of a wgmma
UNIT_ROWS = 16  # of a warp's accumulators
LANE_VALUES = 4  # that a lane holds of UNIT_ROWS rows and 8 columns
CONSUMER_WARPS = 8
CTA_RESERVED = 1024  # bytes of shared memory that an SM keeps for each CTA
MIN_STAGES = 2
RESIDENT_TOKENS, FEW_TOKENS, MANY_TOKENS = 8, 16, 64  # of the tilings
# Where one CTA takes an SM, clusters of more than two leave SMs without one: 18 SMs of a GPC hold
# four of four, and 32 clusters of four run in two waves.
USABLE_BY_CLUSTERS = 0.75


@dataclass(frozen=True)
class Tiling:
    """How a launch divides the product. No bit of a result depends on it.

    Attributes:
        tokens: of a token tile: columns of the products.
        is_streamed: whether e4m3 activations pass through the ring beside 128-row tiles of the
            weight. Else bf16 ones are quantised into shared memory once for all 64-row tiles.
        cluster: CTAs that share the slices of a tile.
    """

    tokens: int
    is_streamed: bool
    cluster: int

    @property
    def ctas_per_sm(self) -> int:
        """Two CTAs fit an SM, so that the next launch's fill their rings while this one ends; the
        accumulators of many tokens take the registers of both."""
        return 2 if self.tokens <= FEW_TOKENS else 1

    @property
    def rows(self) -> int:
        """Of the weight in a row tile."""
        return 2 * M_TILE if self.is_streamed else M_TILE


@dataclass(frozen=True)
class LinearPlan:
    """Every budget of a CTA.

    Attributes:
        in_features: K.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
    """

    in_features: int
    tiling: Tiling
    lanes_per_warp: int = 1

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
    def slice_blocks(self) -> int:
        return self.in_features // K_BLOCK // self.slices

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
    def column_groups(self) -> int:
        """Groups of eight columns."""
        return self.tokens // 8

    @property
    def own_units(self) -> int:
        """Units of 16 rows whose parts a CTA adds."""
        return self.rows // UNIT_ROWS // self.tiling.cluster

    @property
    def weight_bytes(self) -> int:
        """Of a ring's stage."""
        return self.rows * K_BLOCK

    @property
    def x_bytes(self) -> int:
        """Of a ring's stage."""
        return self.tokens * K_BLOCK if self.tiling.is_streamed else 0

    @property
    def partial_values(self) -> int:
        """fp32 elements that a CTA adds of a tile."""
        return self.parts * self.own_units * UNIT_ROWS * self.tokens if self.parts > 1 else 0

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(consumers=CONSUMER_WARPS, load=1)

    @property
    def stages(self) -> int:
        """As many as fit."""
        stages = 1
        while self._fits(stages + 1):
            stages += 1
        return stages

    @property
    def x_tiles(self) -> int:
        """[tokens, 128] tiles of activations in shared memory."""
        return self.stages if self.tiling.is_streamed else self.cta_blocks

    @property
    def capacity(self) -> int:
        """Bytes of shared memory of a CTA."""
        return SM_90A.smem_per_sm // self.tiling.ctas_per_sm - CTA_RESERVED

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(self._buffers(self.stages), self.capacity)

    @property
    def barriers(self) -> BarrierGraph:
        return self._barriers(self.stages)

    def _fits(self, stages: int) -> bool:
        needed = SmemPlan(self._buffers(stages), capacity=1 << 30).total_bytes
        return needed <= self.capacity

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        x_tiles = stages if self.tiling.is_streamed else self.cta_blocks
        return (
            Buffer("weight", "Float8E4M3FN", stages * self.rings * self.weight_bytes, 1024),
            Buffer("x", "Float8E4M3FN", x_tiles * self.tokens * K_BLOCK, 1024),
            # [part, own unit, group of columns, lane, 4]
            Buffer("partials", "Float32", max(self.partial_values, LANE_VALUES), 16),
            # [k block of the CTA, token]
            Buffer("scales", "Float32", self.cta_blocks * self.tokens, 16),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        consumers = Arrival("consumers", Arrive.WARP, warps=CONSUMER_WARPS // self.rings)
        edges = [
            Edge(
                "ring", "k block of a weight tile, of streamed activations",
                (Arrival("load", Arrive.TMA),), (consumers,),
                stages * self.rings, self.weight_bytes + self.x_bytes,
            ),
        ]  # fmt: skip
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
        assert self.own_units * UNIT_ROWS * self.tiling.cluster == self.rows, self.tiling
        assert self.stages >= MIN_STAGES, f"{self.tiling}: K {self.in_features} does not fit"

    def __str__(self) -> str:
        return "\n".join((
            f"K {self.in_features} in {self.slices} slices, {self.rows} rows x {self.tokens} "
            f"tokens, {self.tiling.cluster} CTAs a tile, {self.tiling.ctas_per_sm} an SM",
            f"warps      {self.warps}",
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


def representative(config: Fp8LinearConfig) -> Fp8LinearConfig:
    """The configuration that stands for all with the same kernels: numbers of rows by `spread`."""
    return replace(config, out_features=SM_90A.num_sms // spread(config.out_features) * 2 * M_TILE)


def tilings(config: Fp8LinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels: one for up to 8 tokens where it quantises, one for up
    to 16, and for more those with the largest clusters first.

    Measured on an H200 with the layers of Flash and Pro, 1 to 256 tokens.
    """
    slices, ctas = num_slices(config.in_features), spread(config.out_features)
    found = []
    if config.quantizes:
        cluster = min(max(ctas // 2, 1), slices // 2)
        tiling = Tiling(RESIDENT_TOKENS, False, cluster)
        while 2 * tiling.cluster < slices and not _is_deep(config.in_features, tiling):
            tiling = replace(tiling, cluster=2 * tiling.cluster)
        found.append(tiling)
    found.append(Tiling(FEW_TOKENS, True, min(ctas, slices)))
    clusters = {1: (1,), 2: (2, 1), 4: (2, 1), 8: (8, 2, 1)}[ctas]
    found += [Tiling(MANY_TOKENS, True, cluster) for cluster in clusters if cluster <= slices]
    return tuple(found)


def _is_deep(in_features: int, tiling: Tiling) -> bool:
    """Whether the resident activations leave room for a ring."""
    blocks = in_features // K_BLOCK // tiling.cluster
    left = SM_90A.smem_per_sm // tiling.ctas_per_sm - blocks * K_BLOCK * tiling.tokens
    return left >= 3 * 2 * M_TILE * K_BLOCK


def choose(config: Fp8LinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    found = tilings(config)
    for index, tiling in enumerate(found):
        if tiling.tokens == MANY_TOKENS:
            row_tiles = -(-config.out_features // tiling.rows)
            ctas = row_tiles * -(-tokens // tiling.tokens) * tiling.cluster
            usable = num_sms if tiling.cluster <= 2 else num_sms * USABLE_BY_CLUSTERS
            if ctas <= usable:
                return index
        elif tokens <= tiling.tokens:
            return index
    return len(found) - 1
