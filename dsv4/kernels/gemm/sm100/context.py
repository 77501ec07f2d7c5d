"""Context of Blackwell's linears: what their roles share while they are traced."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.operands import OutputTile, output_tile
from dsv4.kernels.gemm.sm100.plan import LinearPlan, NamedBarriers
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tcgen05 import Tmem

BAND = 8  # token tiles


class Operands(NamedTuple):
    """Tensors of one kind of weights that are not read through TMA."""

    scales: tuple[cute.Tensor, ...]  # [ceil(M / 128), K / 128] of each weight: E8M0 bytes, or fp32
    x: cute.Tensor  # [T, K] bf16, where it is quantised here
    x_scale: cute.Tensor  # [T, K / 128] E8M0 bytes, of codes
    ys: tuple[cute.Tensor, ...]  # [T, M] of each weight, written
    heads: tuple = ()  # `HeadOperands` where a weight has this epilogue
    y_scale: tuple[cute.Tensor, ...] = ()  # [T, M / 128] E8M0 bytes, written, where y are codes
    best: tuple = ()  # `BestOperands` where the largest output is looked for

    @property
    def tokens(self) -> Int32:
        """T; y may be absent where there is something else to write."""
        return Int32(self.best[0].rows.shape[0] if self.best else self.ys[0].shape[0])


@dataclass(frozen=True)
class TileScheduler:
    """Output tiles of a cluster: every `clusters`-th from `cluster` on.

    Token tiles come in bands: those of a row tile run side by side, so that its weights come from
    DRAM once.
    """

    cluster: Int32
    clusters: Int32
    row_tiles: Int32
    token_tiles: Int32
    first_tiles: tuple[Int32, ...]  # first row tile of each weight but the first

    @property
    def count(self) -> Int32:
        """Tiles of this cluster."""
        tiles = self.row_tiles * self.token_tiles
        return (tiles - self.cluster + self.clusters - 1) // self.clusters

    def tile(self, n) -> OutputTile:
        """The n-th tile of this cluster."""
        index = self.cluster + n * self.clusters
        first = index // (self.row_tiles * BAND) * BAND
        width = cutlass.min(self.token_tiles - first, BAND)
        place = index - first * self.row_tiles
        return output_tile(self.first_tiles, place // width, first + place % width)


@dataclass(frozen=True)
class Smem:
    """Shared memory."""

    weight: cute.Pointer  # swizzled [row, 128], by stage
    x: cute.Pointer  # swizzled [token, 128], by stage
    weight_scales: cute.Pointer | None  # [lane, word], by stage
    x_scales: cute.Pointer | None  # [lane, word], by stage and 128 tokens
    partials: cute.Pointer | None  # [part, group of own tokens, row, token]
    maxima: cute.Pointer | None  # int32 [turn, warp, token], of outputs that are rounded
    staged: cute.Pointer | None  # bf16 [token, row], padded, of index heads
    best: cute.Pointer | None  # int64 [warp, token], keys of the largest outputs


@dataclass(frozen=True)
class Pipelines:
    """The edges of `LinearPlan.barriers`."""

    ring: mbarrier.Ring
    sums: mbarrier.Ring
    partials: mbarrier.Buffer | None  # between the CTAs of a cluster


@dataclass(frozen=True)
class LinearContext:
    """A CTA's part of a launch."""

    operands: Operands
    scheduler: TileScheduler
    rank: Int32  # among the CTAs that share the slices of a tile
    smem: Smem
    pipes: Pipelines
    tmem: Tmem


def ring_of(plan: LinearPlan, storage, name: str) -> mbarrier.Ring:
    """The mbarriers of an edge as a ring, of one stage, too."""
    graph = plan.barriers
    full, empty = (getattr(storage, f"{name}_{side}").data_ptr() for side in ("full", "empty"))
    return mbarrier.Ring(full, empty, graph[name].stages, 1, graph.lanes_per_warp)


def allocate(plan: LinearPlan, start: cute.Pointer):
    """Shared memory of a CTA from `start` on: its parts, the mbarriers in it, and what holds the
    address of its TMEM."""
    storage = storage_struct(plan.smem)(start)
    has_partials, has_scales = plan.partial_bytes > 0, plan.is_quantized
    smem = Smem(
        weight=storage.weight.data_ptr(),
        x=storage.x.data_ptr(),
        weight_scales=storage.weight_scales.data_ptr() if has_scales else None,
        x_scales=storage.x_scales.data_ptr() if has_scales else None,
        partials=storage.partials.data_ptr() if has_partials else None,
        maxima=storage.maxima.data_ptr() if plan.rounds_output else None,
        staged=storage.staged.data_ptr() if plan.rounds_heads else None,
        best=storage.best.data_ptr() if plan.finds_best else None,
    )
    pipes = Pipelines(
        ring=ring_of(plan, storage, "ring"),
        sums=ring_of(plan, storage, "sums"),
        partials=mbarrier.pipeline(plan.barriers, storage, "partials") if has_partials else None,
    )
    return smem, pipes, Tmem(storage.tmem_address.data_ptr(), NamedBarriers.TMEM_ALLOCATED)
