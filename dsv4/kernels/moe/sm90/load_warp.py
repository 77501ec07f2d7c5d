"""Load warp of a grouped product: prepared weights by bulk copies, one lane does all of it."""

import cutlass
from cutlass import Int32, Int64, cute

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.tma import bulk_load
from dsv4.kernels.moe.layout import PANEL_ROWS
from dsv4.kernels.moe.plan import ProductPlan
from dsv4.kernels.moe.sm90.context import (
    Operands,
    ProductContext,
    WorkTile,
    byte_pointer,
    read_schedule,
    scale_address,
    weight_address,
)


class LoadWarp:
    """Keeps the ring full of weights: those of the shared expert before the launch before is over.

    Args:
        panels_of: weight and scale of the panels of a pair, and their index in units of 64 rows:
            (operands, is_shared, row tile) -> ((weight, scale, panel), (weight, scale, panel)).
    """

    def __init__(self, plan: ProductPlan, panels_of):
        self.plan = plan
        self.panels_of = panels_of

    @cute.jit
    def load(self, ctx: ProductContext):
        """Load the weights of every tile."""
        plan, ring = self.plan, ctx.pipes.ring
        if cute.arch.lane_idx() == 0:
            # ---- the first tile of the shared expert ----
            early = cutlass.select_(
                ctx.slot < plan.row_tiles, Int32(min(plan.stages, plan.shared.steps)), Int32(0)
            )
            for step in cutlass.range(early, unroll=1):
                self._load_stage(ctx, plan.shared, True, ctx.slot, Int32(0), step, step)
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
                    cursor = self._load_tile(ctx, plan.shared, True, tile, first, cursor)
                else:
                    cursor = self._load_tile(ctx, plan.routed, False, tile, first, cursor)
                tile, first = ahead, Int32(0)

    @cute.jit
    def _load_tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, first, cursor: Cursor,
    ):  # fmt: skip
        ring = ctx.pipes.ring
        for step in cutlass.range(first, tile.steps(kind), unroll=1):
            ring.acquire(cursor)
            self._load_stage(ctx, kind, is_shared, tile.row_tile, tile.expert, step, cursor.stage)
            cursor = ring.next(cursor)
        return cursor

    @cute.jit
    def _load_stage(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        row_tile, expert, step, stage,
    ):  # fmt: skip
        """Announce the bytes of a stage, and load them: k blocks of a panel follow each other."""
        plan = self.plan
        barriers = ctx.pipes.ring.at(stage)
        blocks = Int32(kind.blocks)
        if cutlass.const_expr(plan.k_blocks % kind.blocks != 0):
            blocks = cutlass.min(plan.k_blocks - step * kind.blocks, kind.blocks)
        barriers.expect(blocks * (2 * (kind.block_bytes + kind.scale_block_bytes)))
        panels = self.panels_of(ctx.operands, is_shared, row_tile)
        for index in cutlass.range_constexpr(2):
            weight, scale, panel = panels[index]
            block = Int64(expert) * (plan.out_rows // PANEL_ROWS) + panel
            block = block * plan.k_blocks + step * kind.blocks
            bulk_load(
                byte_pointer(weight, block * kind.block_bytes),
                weight_address(ctx.smem, stage, index, kind, 0),
                blocks * kind.block_bytes,
                barriers.full,
            )
            if cutlass.const_expr(kind.scale_block_bytes > 0):
                bulk_load(
                    byte_pointer(scale, block * kind.scale_block_bytes),
                    scale_address(ctx.smem, stage, index, kind, 0),
                    blocks * kind.scale_block_bytes,
                    barriers.full,
                )


def gate_and_up(operands: Operands, is_shared: bool, row_tile):
    """Panels of a row tile that are gate and up of the same 64 channels."""
    if is_shared:
        return (
            (operands.shared_a, operands.shared_a_scale, row_tile),
            (operands.shared_b, operands.shared_b_scale, row_tile),
        )
    return (operands.a, operands.a_scale, row_tile), (operands.b, operands.b_scale, row_tile)


def down(operands: Operands, is_shared: bool, row_tile):
    """Panels of 128 rows."""
    a, b = gate_and_up(operands, is_shared, row_tile * 2)
    return a, (*b[:2], row_tile * 2 + 1)
