"""Context of a grouped product of experts: what its roles share while it is traced."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.loads import load_words
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, operand_atoms
from dsv4.kernels.kit.wgmma import make_mma
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS
from dsv4.kernels.moe.plan import Kind, ProductPlan
from dsv4.kernels.moe.routing import GROUP_WORDS
from dsv4.kernels.moe.select import live_count

DTYPE = cutlass.Float8E4M3FN


class Operands(NamedTuple):
    """Tensors of a product. `a` and `b` are the rows g and g + 8 of fragments: gate and up, or rows
    of one weight."""

    x: cute.Tensor  # codes [T, K], or rows [P + T, K]: codes, or bf16 quantised on the way
    x_scale: cute.Tensor  # [T, K / 128] E8M0 bytes of codes
    a: cute.Tensor  # prepared routed weights
    a_scale: cute.Tensor
    b: cute.Tensor
    b_scale: cute.Tensor
    shared_a: cute.Tensor  # prepared weights of the shared expert
    shared_a_scale: cute.Tensor  # [M / 128, K / 128]
    shared_b: cute.Tensor
    shared_b_scale: cute.Tensor
    live_tokens: cute.Tensor  # [1], or no rows: all are; for tiles of the shared expert alone
    groups: cute.Tensor  # [G, 4]
    counts: cute.Tensor  # [2]
    pairs: cute.Tensor  # [P]
    weights: cute.Tensor  # [T, k]
    y: cute.Tensor  # written
    y_scale: cute.Tensor | None = None  # E8M0 bytes of each 128 elements, where y are codes
    global_scales: cute.Tensor | None = None  # [3, E] of w1, w3, w2: of NVFP4


class WorkTile(NamedTuple):
    """Rows of one expert's product with some of its tokens."""

    is_shared: Boolean
    row_tile: Int32
    expert: Int32
    first: Int32  # position of a pair, or token of the shared expert
    count: Int32  # columns that are used

    def steps(self, kind: Kind) -> Int32:
        """Stages that pass the ring: none for padding, but for the first tile of the shared expert,
        which the load warp asks for before it knows."""
        is_used = (self.count > 0) | (self.first == 0)
        return cutlass.select_(is_used, Int32(kind.steps), Int32(0))


@dataclass(frozen=True)
class TileScheduler:
    """Tiles of a CTA: every `ctas`-th slot from its first one on.

    Tiles of the shared expert come first: their weights are known before the launch before has
    made the lists. They have twice the bytes of the others: where one fits every CTA, the CTA that
    takes one skips its next turn.
    """

    plan: ProductPlan
    groups: cute.Tensor  # [G, 4]
    num_groups: Int32
    tokens: Int32  # that are no padding
    all_tokens: Int32
    ctas: Int32

    @property
    def shared_slots(self) -> Int32:
        """Of padding, too: where a slot's group lies does not wait for the number of tokens."""
        if not self.plan.has_shared:
            return Int32(0)
        tokens = self.plan.shared.tokens
        return (self.all_tokens + tokens - 1) // tokens * self.plan.row_tiles

    @property
    def skipped(self) -> Int32:
        """Slots of the second turn that stay empty."""
        if not (self.plan.has_shared and self.plan.has_routed):
            return Int32(0)
        return cutlass.select_(self.shared_slots <= self.ctas, self.shared_slots, Int32(0))

    @property
    def slots(self) -> Int32:
        if not self.plan.has_routed:
            return self.shared_slots
        tiles = self.shared_slots + self.num_groups * self.plan.row_tiles
        return tiles + cutlass.select_(tiles > self.ctas, self.skipped, Int32(0))

    def exists(self, slot: Int32) -> Boolean:
        return slot < self.slots

    def next(self, slot: Int32) -> Int32:
        turns = cutlass.select_(slot < self.skipped, Int32(2), Int32(1))
        return slot + turns * self.ctas

    @cute.jit
    def find(self, slot: Int32) -> WorkTile:
        """The tile of a slot; of one that does not exist, an empty one.

        A list is read whether or not it is asked for: behind a branch it would be read after the
        number of groups is there, not beside it.
        """
        plan, select = self.plan, cutlass.select_
        is_shared, exists = slot < self.shared_slots, self.exists(slot)
        routed = slot - self.shared_slots
        routed -= select(slot >= self.ctas, self.skipped, Int32(0))
        index = select(is_shared, slot, routed)
        row_tile, group = index % plan.row_tiles, index // plan.row_tiles
        tokens = plan.shared.tokens
        first = group * tokens
        shared = 0, first, cutlass.max(cutlass.min(self.tokens - first, tokens), 0)
        found = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(plan.has_routed):
            found = load_group(self.groups, cutlass.min(group, self.groups.shape[0] - 1))
        words = [
            select(is_shared, Int32(own), select(exists, word, Int32(0)))
            for own, word in zip(shared, found)
        ]
        return WorkTile(is_shared, row_tile, *words)


@dataclass(frozen=True)
class Smem:
    """Views of shared memory."""

    weight: cute.Pointer  # bytes
    scale: cute.Pointer  # bytes
    x: cute.Pointer  # swizzled [tokens, 128] tiles
    x_tiles: dict[int, cute.Tensor]  # by their tokens: [tokens, 128, tile]
    x_scale: cute.Pointer  # fp32 [stage, k block of the stage, token]
    block_scale: cute.Pointer  # fp32 [stage, k block of the stage, panel]
    board: cute.Pointer | None  # int32 [stage, word], of joint products
    largest: cute.Tensor | None  # fp32 [warp of consumers, column], where h is rounded
    x_bf16_tiles: dict[int, cute.Tensor]  # as `x_tiles`, in bf16


@dataclass(frozen=True)
class Pipelines:
    """The edges of `ProductPlan.barriers`, by their names."""

    edges: dict[str, mbarrier.Ring]

    @property
    def ring(self) -> mbarrier.Ring:
        return self.edges["ring"]

    @property
    def board(self) -> mbarrier.Ring:
        return self.edges["board"]


@dataclass(frozen=True)
class ProductContext:
    """A CTA's part of a launch."""

    operands: Operands
    smem: Smem
    pipes: Pipelines
    slot: Int32  # of its first tile
    ctas: Int32


def read_schedule(ctx: ProductContext, plan: ProductPlan) -> TileScheduler:
    """The tiles of a CTA, after the wait: from the lists that the launch before has made."""
    operands = ctx.operands
    tokens = Int32(operands.weights.shape[0])
    if plan.has_routed:
        num_groups, live = operands.counts[0], operands.counts[1]
    else:
        num_groups, live = Int32(0), live_count(operands.live_tokens, tokens)
    return TileScheduler(plan, operands.groups, num_groups, live, tokens, ctx.ctas)


def load_group(groups: cute.Tensor, group: Int32) -> tuple[Int32, Int32, Int32]:
    """Expert, first position and positions of a group, asked for beside the number of groups, not
    behind it; not the word that others count in."""
    offset = Int64(group) * GROUP_WORDS
    pair = load_words(pointer_at(groups.iterator, offset, Int32, align=8), 2)
    return *pair, *load_words(pointer_at(groups.iterator, offset + 2, Int32, align=4), 1)


def tile_mma(kind: Kind):
    """wgmma of 64 rows of the weight, in registers, and a tile of tokens."""
    shape = (2 * PANEL_ROWS, kind.tokens)
    return make_mma(DTYPE, shape, OperandMajorMode.K, is_a_in_registers=True)


def panels_of(plan: ProductPlan, row_tile) -> tuple:
    """The first of a tile's panels that are rows g of fragments, and of those that are rows g + 8:
    of gate and of up, or, of one weight, those that follow."""
    if plan.is_gated:
        first = row_tile * plan.panels
        return first, first
    first = row_tile * (2 * plan.panels)
    return first, first + plan.panels


def weight_offset(plan: ProductPlan, stage, panel, kind: Kind, block):
    """Byte of a panel's k block of a stage; the panels are those of rows g, then of rows g + 8."""
    offset = stage * plan.weight_bytes + (panel * kind.blocks + block) * kind.block_bytes
    return cute.assume(offset, divby=kind.block_bytes)


def scale_offset(plan: ProductPlan, stage, panel, kind: Kind, block):
    """Byte of the scale words of a panel's k block of a stage."""
    offset = stage * plan.scale_bytes + (panel * kind.blocks + block) * kind.scale_block_bytes
    return cute.assume(offset, divby=kind.scale_block_bytes)


def allocate(plan: ProductPlan) -> tuple[Smem, Pipelines]:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    k_major, _ = operand_atoms(DTYPE, SPAN_BYTES)
    rows = plan.stages * plan.x_rows

    def tiles_of(tokens: int) -> cute.Tensor:
        shape = (tokens, K_BLOCK, rows // tokens)
        layout = cute.tile_to_shape(k_major, shape, order=(0, 1, 2))
        return storage.x.get_tensor(layout.outer, swizzle=layout.inner)

    smem = Smem(
        weight=storage.weight.data_ptr(),
        scale=storage.scale.data_ptr(),
        x=storage.x.data_ptr(),
        x_tiles={kind.tokens: tiles_of(kind.tokens) for kind in plan.kinds if not kind.is_bf16},
        x_bf16_tiles={
            kind.tokens: bf16_tiles(storage.x.data_ptr(), rows // kind.x_rows, kind.tokens)
            for kind in plan.kinds
            if kind.is_bf16
        },
        x_scale=storage.x_scale.data_ptr(),
        block_scale=storage.block_scale.data_ptr(),
        board=storage.board.data_ptr() if plan.tiling.is_joint else None,
        largest=_largest(storage, plan) if plan.largest else None,
    )
    names = [edge.name for edge in plan.barriers.edges]
    edges = {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
    return smem, Pipelines(edges)


def _largest(storage, plan: ProductPlan) -> cute.Tensor:
    """Magnitudes [warp of consumers, column]."""
    warps = plan.warps["consumers"].count
    layout = cute.make_layout((warps, plan.largest // warps))
    return cute.make_tensor(storage.largest.data_ptr(), layout)


def bf16_tiles(start: cute.Pointer, count: int, tokens: int) -> cute.Tensor:
    """[tokens, 128, tile] bf16 from `start` on, in two swizzled spans of 64 elements."""
    k_major, _ = operand_atoms(cutlass.BFloat16, SPAN_BYTES)
    layout = cute.tile_to_shape(k_major, (tokens, K_BLOCK, count), order=(0, 1, 2))
    pointer = cute.recast_ptr(start, layout.inner, dtype=cutlass.BFloat16)
    return cute.make_tensor(pointer, layout.outer)
