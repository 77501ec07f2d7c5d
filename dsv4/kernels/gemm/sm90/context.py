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


class Operands(NamedTuple):
    """Tensors that are not read through TMA."""

    scale: cute.Tensor  # [ceil(M / 128), K / 128] of the weight: E8M0 bytes, or fp32
    x: cute.Tensor  # [T, K] bf16 where activations are resident
    x_scale: cute.Tensor  # [T, K / 128] E8M0 bytes, of streamed activations
    y: cute.Tensor  # [T, M], written


class OutputTile(NamedTuple):
    """Coordinates of an output tile."""

    row_tile: Int32
    token_tile: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Output tiles of a cluster: every `clusters`-th from `cluster` on, row tiles first."""

    cluster: Int32
    clusters: Int32
    row_tiles: Int32
    tiles: Int32

    def coordinates(self, index: Int32) -> OutputTile:
        return OutputTile(index % self.row_tiles, index // self.row_tiles)

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
    scales: cute.Tensor  # [token, k block of the CTA] of the activations


@dataclass(frozen=True)
class Pipelines:
    """The edges of `LinearPlan.barriers`."""

    ring: mbarrier.Ring
    partials: mbarrier.Buffer | None  # between the CTAs of a cluster


@dataclass(frozen=True)
class LinearContext:
    """A CTA's part of a launch."""

    operands: Operands
    scheduler: TileScheduler
    rank: Int32  # in its cluster
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
        scales=storage.scales.get_tensor(cute.make_layout((plan.tokens, plan.cta_blocks))),
    )
    graph = plan.barriers
    ring = mbarrier.pipeline(graph, storage, "ring", plan.rings)
    partials = None
    if plan.tiling.cluster > 1:
        partials = mbarrier.pipeline(graph, storage, "partials")
    return smem, Pipelines(ring, partials)
