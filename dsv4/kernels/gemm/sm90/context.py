"""Context of the weight-streaming kernel: what its roles share while it is traced."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode

from dsv4.kernels.gemm.config import Kind, num_code_rows
from dsv4.kernels.gemm.operands import OutputTile, output_tile
from dsv4.kernels.gemm.plan import FEW_TOKENS, M_TILE, LinearPlan
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.divisor import divisor
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, operand_atoms
from dsv4.kernels.kit.tma import EVICT_FIRST, EVICT_NORMAL
from dsv4.kernels.kit.wgmma import make_mma

DTYPES = {Kind.FP8: cutlass.Float8E4M3FN, Kind.BF16: cutlass.BFloat16}


class Operands(NamedTuple):
    """Tensors of one kind of weights that are not read through TMA."""

    scales: tuple[cute.Tensor, ...]  # [ceil(M / 128), K / 128] of each weight: E8M0 bytes, or fp32
    x: cute.Tensor  # [T, K] bf16 where activations are resident
    x_scale: cute.Tensor  # [T, K / 128] E8M0 bytes, of streamed activations
    ys: tuple[cute.Tensor, ...]  # [T, M] of each weight, written
    stores_by_tma: Boolean  # whether y is aligned for it
    heads: tuple = ()  # `HeadOperands` where a weight has this epilogue
    y_scale: tuple[cute.Tensor, ...] = ()  # [T, M / 128] E8M0 bytes, written, where y are codes
    best: tuple = ()  # `BestOperands` where the largest output is looked for

    @property
    def tokens(self) -> Int32:
        """T; y may be absent where there is something else to write."""
        return Int32(self.best[0].rows.shape[0] if self.best else self.ys[0].shape[0])


class RowsFirst(NamedTuple):
    """Order of the tiles of few tokens: all of a token tile, then those of the next one."""

    by_rows: cute.FastDivmodDivisorV2  # row groups

    @classmethod
    def of(cls, row_groups: Int32) -> "RowsFirst":
        """Host code."""
        return cls(divisor(row_groups))

    def place(self, index: Int32, band: int) -> tuple[Int32, Int32]:
        """Row group and token tile of a tile."""
        token, row = divmod(index, self.by_rows)
        return row, token


class Bands(NamedTuple):
    """Order of the tiles of many tokens, in bands: the token tiles of a row tile run side by side,
    so that its weights come from DRAM once."""

    by_band: cute.FastDivmodDivisorV2  # tiles of a whole band
    by_last: cute.FastDivmodDivisorV2  # token tiles of the last one
    last: Int32

    @classmethod
    def of(cls, row_groups: Int32, token_tiles: Int32, band: int) -> "Bands":
        """Host code; `band` is the token tiles of a whole one."""
        last = cutlass.max(token_tiles - 1, 0) // band
        return cls(divisor(row_groups * band), divisor(token_tiles - last * band), last)

    def place(self, index: Int32, band: int) -> tuple[Int32, Int32]:
        """Row group and token tile of a tile."""
        number, place = divmod(index, self.by_band)
        last_row, last_token = divmod(place, self.by_last)
        is_last = number == self.last
        row = Int32(cutlass.select_(is_last, last_row, place // band))
        token = Int32(cutlass.select_(is_last, last_token, place % band))
        return row, number * band + token


@dataclass(frozen=True)
class TileScheduler:
    """Output tiles of a cluster: every `clusters`-th from `cluster` on."""

    cluster: Int32
    by_clusters: cute.FastDivmodDivisorV2
    tiles: Int32  # for each CTA of the cluster
    first_tiles: tuple[Int32, ...]  # first row tile of each weight but the first
    sharing: int  # CTAs that have row tiles of a group
    row_rank: Int32  # among those CTAs
    order: RowsFirst | Bands
    band: int  # token tiles

    def coordinates(self, index: Int32) -> OutputTile:
        row_group, token_tile = self.order.place(index, self.band)
        row_tile = row_group * self.sharing + self.row_rank
        return output_tile(self.first_tiles, row_tile, token_tile)

    @property
    def clusters(self) -> Int32:
        return self.by_clusters.divisor

    @property
    def count(self) -> Int32:
        """Tiles of this cluster."""
        return (self.tiles - self.cluster + self.clusters - 1) // self.by_clusters

    def index(self, n) -> Int32:
        """The n-th tile of this cluster."""
        return self.cluster + n * self.clusters

    def exists(self, index: Int32) -> Boolean:
        return index < self.tiles


class LastTokens(NamedTuple):
    """The last token tile of a launch.

    Attributes:
        copies: `short_tiles.short_copies` of it.
    """

    tile: Int32
    copies: Int32

    @classmethod
    def of(cls, plan: LinearPlan, tokens: Int32) -> "LastTokens":
        if not plan.has_streamed_x:
            return cls(Int32(0), Int32(0))
        rows = num_code_rows(tokens, plan.tiling.terms)
        columns, short = plan.columns, plan.short_rows
        tile = (rows - 1) // columns
        copies = (rows - tile * columns + short - 1) // short
        is_short = copies * short < columns
        return cls(tile, Int32(cutlass.select_(is_short, copies, Int32(0))))


@dataclass(frozen=True)
class Smem:
    """Views of shared memory."""

    weight: cute.Tensor  # swizzled [64, k block, 64-row tile]; tokens in M: [128, k block, tile]
    x: cute.Tensor  # swizzled [columns, k block, tile]; tokens in M: [64, k block, half of a tile]
    weight_start: cute.Pointer
    x_start: cute.Pointer
    partials: cute.Pointer  # [part, own unit, group of columns, lane, 4]
    # [token, k block of the CTA] of the activations; wide: products, by stage
    scales: cute.Tensor | None
    # [warpgroup, level, vector, thread, 4], or [warpgroup, token, 64 rows]
    spills: cute.Pointer | None
    staged: cute.Pointer | None  # bf16 [token, row], padded, of outputs that are rounded
    best: cute.Pointer | None  # int64 [warp, token], keys of the largest outputs


@dataclass(frozen=True)
class Pipelines:
    """The edges of `LinearPlan.barriers`."""

    ring: mbarrier.Ring
    partials: mbarrier.Buffer | None  # between the CTAs of a cluster
    filling: mbarrier.Signal | None  # where `LinearPlan.signals_weights`


@dataclass(frozen=True)
class LinearContext:
    """A CTA's part of a launch: that of one kind of weights."""

    operands: Operands
    scheduler: TileScheduler
    rank: Int32  # among the CTAs that share the slices of a tile
    smem: Smem
    pipes: Pipelines
    weight_policy: Int64 | int  # of L2
    copied_rows: tuple[int, ...]  # of a copy of each weight
    last_tokens: LastTokens


def weight_policy(plan: LinearPlan, token_tiles: Int32) -> Int64 | int:
    """Policy of L2 for weights: what one token tile reads is not read again, and leaves first.

    Else the weights of a step, more than L2 holds between two uses of a kernel, would push out
    instructions, the streams between the sublayers and the keys of a cache."""
    if plan.tokens <= FEW_TOKENS:  # a launch of them has one token tile
        return EVICT_FIRST
    return Int64(cutlass.select_(token_tiles == 1, Int64(EVICT_FIRST), Int64(EVICT_NORMAL)))


def tile_mma(plan: LinearPlan):
    """wgmma of 64 rows of the weight and a tile of columns, or of 64 columns and a tile of rows."""
    n = plan.rows if plan.has_tokens_in_m else plan.columns
    return make_mma(DTYPES[plan.kind], (M_TILE, n), OperandMajorMode.K)


def sum_fragment(plan: LinearPlan) -> cute.Tensor:
    """A warpgroup's share of a tile's sums, as wgmma has products of one term."""
    tile = (M_TILE, plan.tokens)
    mma = make_mma(DTYPES[plan.kind], tile, OperandMajorMode.K)
    return mma.make_fragment_C(mma.partition_shape_C(tile))


def staged_outputs(plan: LinearPlan, storage) -> cute.Pointer | None:
    """Where outputs that are rounded meet: in place of those that are stored by TMA, if any are."""
    if not plan.rounds_output:
        return None
    if plan.stages_output:
        return cute.recast_ptr(storage.spills.data_ptr(), dtype=cutlass.BFloat16)
    return storage.staged.data_ptr()


def allocate(plan: LinearPlan, start: cute.Pointer) -> tuple[Smem, Pipelines]:
    """Shared memory of a CTA from `start` on: its views, and the mbarriers in it."""
    storage = storage_struct(plan.smem)(start)
    k_major, _ = operand_atoms(DTYPES[plan.kind], SPAN_BYTES)
    step = plan.kind.step
    rows, columns = M_TILE, plan.columns
    if plan.has_tokens_in_m:
        rows, columns = plan.rows, M_TILE
    weight_tiles = plan.smem["weight"].count // (rows * step)
    x_tiles = plan.smem["x"].count // (columns * step)
    weight = cute.tile_to_shape(k_major, (rows, step, weight_tiles), order=(0, 1, 2))
    x = cute.tile_to_shape(k_major, (columns, step, x_tiles), order=(0, 1, 2))
    scales = None
    if plan.is_quantized:
        blocks = plan.smem["scales"].count // plan.tokens
        scales = storage.scales.get_tensor(cute.make_layout((plan.tokens, blocks)))
    smem = Smem(
        weight=storage.weight.get_tensor(weight.outer, swizzle=weight.inner),
        x=storage.x.get_tensor(x.outer, swizzle=x.inner),
        weight_start=storage.weight.data_ptr(),
        x_start=storage.x.data_ptr(),
        partials=storage.partials.data_ptr(),
        scales=scales,
        spills=storage.spills.data_ptr() if plan.spill_values else None,
        staged=staged_outputs(plan, storage),
        best=storage.best.data_ptr() if plan.finds_best else None,
    )
    graph = plan.barriers
    ring = mbarrier.pipeline(graph, storage, "ring", plan.rings)
    partials = None
    if plan.tiling.cluster > 1:
        partials = mbarrier.pipeline(graph, storage, "partials")
    filling = None
    if plan.signals_weights:
        filling = mbarrier.pipeline(graph, storage, "filling")
    return smem, Pipelines(ring, partials, filling)
