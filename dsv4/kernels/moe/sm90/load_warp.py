"""Load warp of a grouped product: prepared weights by bulk copies, a lane for each panel."""

import cutlass
from cutlass import Int32, Int64, Uint8, cute

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.tma import EVICT_FIRST, bulk_load
from dsv4.kernels.moe.layout import PANEL_ROWS
from dsv4.kernels.moe.plan import ProductPlan
from dsv4.kernels.moe.sm90.context import (
    ProductContext,
    WorkTile,
    panels_of,
    read_schedule,
    scale_offset,
    weight_offset,
)


class LoadWarp:
    """Producer of the ring's weights, the shared expert's before the launch before is over."""

    def __init__(self, plan: ProductPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: ProductContext):
        """Load the weights of every tile."""
        plan, ring = self.plan, ctx.pipes.ring
        lane = cute.arch.lane_idx()
        # ---- the first tile of the shared expert ----
        early = Int32(0)
        if cutlass.const_expr(plan.has_shared):
            if ctx.slot < plan.row_tiles:
                early = Int32(min(plan.stages, plan.shared.steps))
            for step in cutlass.range(early, unroll=1):
                self.load_stage(ctx, plan.shared, True, ctx.slot, Int32(0), lane, step, step)
        pdl.wait_for_previous_launch()
        scheduler = read_schedule(ctx, plan)
        # ---- the others ----
        cursor = ring.skip(ring.producer(), early)
        slot, first = ctx.slot, early
        tile = scheduler.find(slot)
        while scheduler.exists(slot):
            slot = scheduler.next(slot)
            ahead = scheduler.find(slot)
            if tile.is_shared:
                if cutlass.const_expr(plan.has_shared):
                    cursor = self.load_tile(ctx, plan.shared, True, tile, lane, first, cursor)
            elif cutlass.const_expr(plan.has_routed):
                cursor = self.load_tile(ctx, plan.routed[0], False, tile, lane, first, cursor)
            tile, first = ahead, Int32(0)

    @cute.jit
    def load_tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, lane, first, cursor: Cursor, count=None,
    ):  # fmt: skip
        """Load the stages of a tile from `first` on, all or `count` at most."""
        ring = ctx.pipes.ring
        end = tile.steps(kind)
        if cutlass.const_expr(count is not None):
            end = cutlass.min(end, first + count)
        for step in cutlass.range(first, end, unroll=1):
            ring.acquire(cursor)
            self.load_stage(
                ctx, kind, is_shared, tile.row_tile, tile.expert, lane, step, cursor.stage
            )
            cursor = ring.next(cursor)
        return cursor

    @cute.jit
    def load_stage(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        row_tile, expert, lane, step, stage,
    ):  # fmt: skip
        """Announce the bytes of a stage, and load them."""
        plan = self.plan
        barriers = ctx.pipes.ring.at(stage)
        blocks = Int32(kind.blocks)
        if cutlass.const_expr(plan.k_blocks % kind.blocks != 0):
            blocks = cutlass.min(plan.k_blocks - step * kind.blocks, kind.blocks)
        if lane == 0:
            barriers.expect(blocks * plan.stage_bytes(kind))
        cute.arch.sync_warp()
        if lane < 2 * plan.panels:
            self.load_panel(ctx, kind, is_shared, row_tile, expert, lane, step, blocks, stage)

    @cute.jit
    def load_panel(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        row_tile, expert, number, step, blocks, stage,
    ):  # fmt: skip
        """Load the k blocks of a stage of a panel, which follow each other.

        Args:
            number: among those of a tile.
        """
        plan, operands = self.plan, ctx.operands
        full = ctx.pipes.ring.at(stage).full
        policy = EVICT_FIRST if plan.tiling.reads_once else None
        is_second = number >= plan.panels
        a, b = panels_of(plan, row_tile)
        panel = cutlass.select_(is_second, b - plan.panels, a) + number
        block = Int64(expert) * (plan.out_rows // PANEL_ROWS) + panel
        block = block * plan.k_blocks + step * kind.blocks
        weights = operands.a, operands.b
        scales = operands.a_scale, operands.b_scale
        if cutlass.const_expr(is_shared):
            weights = operands.shared_a, operands.shared_b
        bulk_load(
            either(weights, is_second, block * kind.block_bytes),
            ctx.smem.weight + weight_offset(plan, stage, number, kind, 0),
            blocks * kind.block_bytes,
            full,
            policy,
        )
        if cutlass.const_expr(kind.scale_block_bytes > 0):
            bulk_load(
                either(scales, is_second, block * kind.scale_block_bytes),
                ctx.smem.scale + scale_offset(plan, stage, number, kind, 0),
                blocks * kind.scale_block_bytes,
                full,
                policy,
            )


def either(tensors: tuple[cute.Tensor, cute.Tensor], is_second, offset: Int64) -> cute.Pointer:
    """16-byte aligned global address of a byte of one of two tensors."""
    starts = [tensor.iterator.toint() for tensor in tensors]
    base = cutlass.select_(is_second, starts[1], starts[0])
    return cute.make_ptr(Uint8, base + offset, cute.AddressSpace.gmem, assumed_align=16)
