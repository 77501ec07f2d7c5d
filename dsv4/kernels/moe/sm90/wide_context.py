"""Context of a product of many tokens: what its roles share while it is traced."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental.cuda.tensor_map import TensorMapL2Promotion, create_tensor_map_tiled
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, TENSOR_MAP_SWIZZLES, VECTOR_BYTES, operand_atoms
from dsv4.kernels.moe.layout import K_BLOCK
from dsv4.kernels.moe.sm90.context import DTYPE, Pipelines, ProductContext, Smem, WorkTile
from dsv4.kernels.moe.wide_plan import SCALE_BYTES, SCALE_COPIES, SCALE_STEP, WidePlan


class Activations(NamedTuple):
    """Activations of a product in the order of tiles.

    Attributes:
        codes: [rows, K] e4m3, of routed tiles by position.
        shared_codes: [rows, K] e4m3, of tiles of the shared expert from `shared_first` on.
        scales: [2 K / 128, > rows] fp32, twice: by position, then of the shared expert by token.
        shared_first: row of `shared_codes` of the shared expert's first token.
    """

    codes: cute.Tensor
    shared_codes: cute.Tensor
    scales: cute.Tensor
    shared_first: Int32


@dataclass(frozen=True)
class WideScheduler:
    """Tiles of a CTA: its own of every `clusters`-th slot from its first one on.

    Tiles of the shared expert come first, which take longest: their weights are FP8. Row tiles of a
    group follow each other, so that CTAs beside each other read the same tokens.
    """

    plan: WidePlan
    groups: cute.Tensor  # [G, 4]
    num_groups: Int32
    tokens: Int32  # that are no padding
    clusters: Int32
    rank: Int32  # in the cluster

    @property
    def shared_slots(self) -> Int32:
        columns = self.plan.shared.tokens
        return (self.tokens + columns - 1) // columns * self.plan.row_groups

    def exists(self, slot: Int32) -> Boolean:
        return slot < self.shared_slots + self.num_groups * self.plan.row_groups

    def next(self, slot: Int32) -> Int32:
        return slot + self.clusters

    @cute.jit
    def find(self, slot: Int32) -> WorkTile:
        """The tile of a slot; of one that does not exist, an empty one."""
        plan = self.plan
        is_shared = slot < self.shared_slots
        index = cutlass.select_(is_shared, slot, slot - self.shared_slots)
        row_tile = index % plan.row_groups * plan.sharing + self.rank
        group = index // plan.row_groups
        expert, first, count = Int32(0), Int32(0), Int32(0)
        if is_shared:
            first = group * plan.shared.tokens
            count = cutlass.min(self.tokens - first, plan.shared.tokens)
        elif group < self.num_groups:
            words = cute.make_rmem_tensor(4, Int32)
            source = pointer_at(self.groups.iterator, Int64(group) * 4, Int32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
            expert, first, count = words[0], words[1], words[2]
        return WorkTile(is_shared, row_tile, expert, first, count)


@dataclass(frozen=True)
class WideSmem(Smem):
    """Views of shared memory, with outputs of down on their way."""

    staged: cute.Pointer | None  # bytes [token, output of bf16]
    places: cute.Pointer | None  # int32 [token]


@dataclass(frozen=True)
class WideContext(ProductContext):
    """A CTA's part of a launch; its slot and CTAs are the cluster's."""

    activations: Activations
    factors: cute.Tensor  # [P] fp32: routing weights by position
    rank: Int32


def read_schedule(ctx: WideContext, plan: WidePlan) -> WideScheduler:
    """The tiles of a CTA, after the wait: from the lists that a launch before has made."""
    counts = ctx.operands.counts
    return WideScheduler(plan, ctx.operands.groups, counts[0], counts[1], ctx.ctas, ctx.rank)


class ScalePlace(NamedTuple):
    """Place of the scales of a tile's activations.

    Attributes:
        copy: that has the first one at an even place.
        first: column that is loaded first.
        shift: of the tile's first one from there.
    """

    copy: Int32
    first: Int32
    shift: Int32


def scale_place(ctx: WideContext, is_shared: bool, tile: WorkTile) -> ScalePlace:
    """Where a tile's scales are."""
    column = tile.first
    if is_shared:
        column += ctx.operands.pairs.shape[0]
    copy = column % SCALE_COPIES
    column += copy
    shift = column % SCALE_STEP
    return ScalePlace(copy, column - shift, shift)


def code_map(codes: cute.Tensor, rows: int):
    """TMA descriptor of codes [row, K] as (k of a block, row, k block); rows past the end are read
    as zeros."""
    return create_tensor_map_tiled(
        codes.iterator.toint(),
        DTYPE,
        [K_BLOCK, Int32(codes.shape[0]), codes.shape[1] // K_BLOCK],
        [Int64(codes.stride[0]) // VECTOR_BYTES, K_BLOCK // VECTOR_BYTES],
        [K_BLOCK, rows, 1],
        swizzle=TENSOR_MAP_SWIZZLES[SPAN_BYTES],
        l2_promotion=TensorMapL2Promotion.none,
    )


def scale_map(scales: cute.Tensor, rows: int):
    """TMA descriptor of scales [copy and k block, row]."""
    return create_tensor_map_tiled(
        scales.iterator.toint(),
        Float32,
        [Int32(scales.shape[1]), scales.shape[0]],
        [Int64(scales.stride[0]) * SCALE_BYTES // VECTOR_BYTES],
        [rows, 1],
        l2_promotion=TensorMapL2Promotion.none,
    )


def make_maps(plan: WidePlan, activations: Activations) -> tuple[tuple, tuple]:
    """The descriptors of a launch, of codes and of scales, for each kind of tile."""
    kinds = plan.kinds
    codes = [activations.codes] * len(plan.routed) + [activations.shared_codes]
    return (
        tuple(code_map(c, kind.tokens // plan.sharing) for c, kind in zip(codes, kinds)),
        tuple(scale_map(activations.scales, kind.tokens + SCALE_STEP) for kind in kinds),
    )


def allocate(plan: WidePlan) -> tuple[WideSmem, Pipelines]:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    k_major, _ = operand_atoms(DTYPE, SPAN_BYTES)

    def tiles_of(tokens: int) -> cute.Tensor:
        """[tokens, 128, stage]"""
        tile = cute.tile_to_shape(k_major, (tokens, K_BLOCK), order=(0, 1))
        stages = cute.make_layout(plan.stages, stride=plan.x_rows * K_BLOCK)
        return storage.x.get_tensor(cute.append(tile.outer, stages), swizzle=tile.inner)

    smem = WideSmem(
        weight=storage.weight.data_ptr(),
        scale=storage.scale.data_ptr(),
        x=storage.x.data_ptr(),
        x_tiles={kind.tokens: tiles_of(kind.tokens) for kind in plan.kinds},
        x_scale=storage.x_scale.data_ptr(),
        block_scale=None,
        board=None,
        largest=None,
        x_bf16_tiles={},
        staged=None if plan.is_gated else storage.staged.data_ptr(),
        places=None if plan.is_gated else storage.places.data_ptr(),
    )
    names = [edge.name for edge in plan.barriers.edges]
    edges = {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
    return smem, Pipelines(edges)
