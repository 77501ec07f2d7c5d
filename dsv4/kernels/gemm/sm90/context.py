"""Context of the weight-streaming kernel: what its roles share while it is traced."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.plan import M_TILE, LinearPlan
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, operand_atoms
from dsv4.kernels.kit.wgmma import make_mma

DTYPE = cutlass.Float8E4M3FN
BAND = 8  # token tiles


class Operands(NamedTuple):
    """Tensors that are not read through TMA."""

    scale: cute.Tensor  # [ceil(M / 128), K / 128] of the weight: E8M0 bytes, or fp32
    x: cute.Tensor  # [T, K] bf16 where activations are resident
    x_scale: cute.Tensor  # [T, K / 128] E8M0 bytes, of streamed activations
    y: cute.Tensor  # [T, M], written
    stores_by_tma: Boolean  # whether y is aligned for it


class OutputTile(NamedTuple):
    """Coordinates of an output tile."""

    row_tile: Int32
    token_tile: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Output tiles of a cluster: every `clusters`-th from `cluster` on.

    Row tiles come first where there are few tokens. Else token tiles do, in bands: those of a row
    tile run side by side, so that its weights come from DRAM once.
    """

    cluster: Int32
    clusters: Int32
    row_groups: Int32  # of as many row tiles as CTAs share activations
    tiles: Int32  # for each CTA of the cluster
    sharing: int
    row_rank: Int32  # among those CTAs
    token_tiles: Int32 | None = None  # where they come in bands

    def coordinates(self, index: Int32) -> OutputTile:
        if self.token_tiles is None:
            return OutputTile(index % self.row_groups, index // self.row_groups)
        band = index // (self.row_groups * BAND)
        first = band * BAND
        width = cutlass.min(self.token_tiles - first, BAND)
        place = index - first * self.row_groups
        row_tile = place // width * self.sharing + self.row_rank
        return OutputTile(row_tile, first + place % width)

    @property
    def count(self) -> Int32:
        """Tiles of this cluster."""
        return (self.tiles - self.cluster + self.clusters - 1) // self.clusters

    def index(self, n) -> Int32:
        """The n-th tile of this cluster."""
        return self.cluster + n * self.clusters

    def exists(self, index: Int32) -> Boolean:
        return index < self.tiles


@dataclass(frozen=True)
class Smem:
    """Views of shared memory."""

    weight: cute.Tensor  # swizzled [64, 128, 64-row tile]
    x: cute.Tensor  # swizzled [tokens, 128, tile]
    weight_start: cute.Pointer
    x_start: cute.Pointer
    partials: cute.Pointer  # [part, own unit, group of columns, lane, 4]
    scales: cute.Tensor  # [token, k block of the CTA] of the activations; wide: products, by stage
    # [warpgroup, level, vector, thread, 4], or [warpgroup, token, 64 rows]
    spills: cute.Pointer | None


@dataclass(frozen=True)
class Pipelines:
    """The edges of `LinearPlan.barriers`."""

    ring: mbarrier.Ring
    partials: mbarrier.Buffer | None  # between the CTAs of a cluster
    turns: mbarrier.Signal | None  # between the warpgroups of a wide tile


@dataclass(frozen=True)
class LinearContext:
    """A CTA's part of a launch."""

    operands: Operands
    scheduler: TileScheduler
    rank: Int32  # among the CTAs that share the slices of a tile
    smem: Smem
    pipes: Pipelines


def tile_mma(plan: LinearPlan):
    """wgmma of 64 rows of the weight and a tile of tokens."""
    return make_mma(DTYPE, (M_TILE, plan.tokens), OperandMajorMode.K)


def allocate(plan: LinearPlan) -> tuple[Smem, Pipelines]:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    k_major, _ = operand_atoms(DTYPE, SPAN_BYTES)
    weight_tiles = plan.smem["weight"].count // (M_TILE * K_BLOCK)
    a = cute.tile_to_shape(k_major, (M_TILE, K_BLOCK, weight_tiles), order=(0, 1, 2))
    b = cute.tile_to_shape(k_major, (plan.tokens, K_BLOCK, plan.x_tiles), order=(0, 1, 2))
    smem = Smem(
        weight=storage.weight.get_tensor(a.outer, swizzle=a.inner),
        x=storage.x.get_tensor(b.outer, swizzle=b.inner),
        weight_start=storage.weight.data_ptr(),
        x_start=storage.x.data_ptr(),
        partials=storage.partials.data_ptr(),
        scales=storage.scales.get_tensor(
            cute.make_layout((plan.tokens, plan.smem["scales"].count // plan.tokens))
        ),
        spills=storage.spills.data_ptr() if plan.spill_values else None,
    )
    graph = plan.barriers
    ring = mbarrier.pipeline(graph, storage, "ring", plan.rings)
    partials = turns = None
    if plan.tiling.cluster > 1:
        partials = mbarrier.pipeline(graph, storage, "partials")
    if plan.tiling.is_wide:
        turns = mbarrier.pipeline(graph, storage, "turns")
    return smem, Pipelines(ring, partials, turns)
