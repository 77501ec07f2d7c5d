"""Load warp of the weight-streaming kernel: weights, and streamed activations, by TMA."""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.operands import OutputTile, first_x_block
from dsv4.kernels.gemm.plan import LinearPlan
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.gemm.sm90.short_tiles import short_copies, weight_bytes, x_bytes
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import (
    chosen_descriptor,
    prefetch_descriptors,
    tma_load,
    tma_multicast,
)


class LoadWarp:
    """Producer of the rings: weights first, activations when the launch before is over."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: LinearContext, weight_maps, x_maps):
        """Load the k blocks of every tile; one lane does all of it."""
        plan, ring = self.plan, ctx.pipes.ring
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors((*weight_maps, *x_maps))
            count = ctx.scheduler.count * plan.ring_blocks
            # The launch before writes no weights: see `kit.pdl`. Each stage is empty at first.
            early = cutlass.min(count, plan.stages)
            self._fill(ctx, weight_maps, early)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(plan.has_streamed_x):
                self._complete(ctx, x_maps, early)
            # One turn on: what a consumer waits for next is what this role waits for now.
            cursor = ring.consumer()
            for step in cutlass.range(early, count, unroll=1):
                for part in cutlass.range_constexpr(plan.rings):
                    ring.acquire(cursor, part)
                tile, block = self._place(ctx, step)
                copies = short_copies(ctx, tile)
                load_weights(plan, ctx, weight_maps, tile, copies, block, cursor.stage)
                if cutlass.const_expr(plan.has_streamed_x):
                    load_activations(plan, ctx, x_maps, tile, copies, block, cursor.stage)
                cursor = ring.next(cursor)

    @cute.jit
    def _fill(self, ctx: LinearContext, weight_maps, early):
        """Load the weights of the first stages, `LinearPlan.window` at a time."""
        plan, filling = self.plan, ctx.pipes.filling
        window = plan.window
        for step in cutlass.range(early, unroll=1):
            if step >= window:
                self._wait_for_weights(ctx, step - window)
            tile, block = self._place(ctx, step)
            copies = short_copies(ctx, tile)
            if cutlass.const_expr(filling is None):
                load_weights(plan, ctx, weight_maps, tile, copies, block, step)
            elif step < early - window:
                full = filling.at(step % window).full
                expected = plan.rings * weight_bytes(ctx, tile)
                cute.arch.mbarrier_arrive_and_expect_tx(full, expected)
                copy_weights(plan, ctx, weight_maps, tile, block, step, full)
            else:
                load_weights(plan, ctx, weight_maps, tile, copies, block, step)

    @cute.jit
    def _wait_for_weights(self, ctx: LinearContext, step):
        """Wait until the weights of a stage of the first filling are there."""
        plan, filling = self.plan, ctx.pipes.filling
        if cutlass.const_expr(filling is None):
            for part in cutlass.range_constexpr(plan.rings):
                ctx.pipes.ring.at(step * plan.rings + part).wait(Int32(0))
        else:
            filling.at(step % plan.window).wait(step // plan.window & 1)

    @cute.jit
    def _complete(self, ctx: LinearContext, x_maps, early):
        """Load the activations of the first stages, and announce those whose weights are there."""
        plan = self.plan
        for step in cutlass.range(early, unroll=1):
            tile, block = self._place(ctx, step)
            copies = short_copies(ctx, tile)
            if step < early - plan.window:
                for part in cutlass.range_constexpr(plan.rings):
                    ctx.pipes.ring.expect(step * plan.rings + part, x_bytes(plan, copies))
            load_activations(plan, ctx, x_maps, tile, copies, block, step)

    def _place(self, ctx: LinearContext, step):
        """Output tile of a step, and its k block among those of a ring."""
        tile = ctx.scheduler.coordinates(ctx.scheduler.index(step // self.plan.ring_blocks))
        return tile, step % self.plan.ring_blocks


def load_weights(
    plan: LinearPlan, ctx: LinearContext, weight_maps, tile: OutputTile, copies, block, stage
):
    """Announce the bytes of a stage, and load its weights."""
    expected = weight_bytes(ctx, tile) + x_bytes(plan, copies)
    for part in range(plan.rings):
        ctx.pipes.ring.expect(stage * plan.rings + part, expected)
    copy_weights(plan, ctx, weight_maps, tile, block, stage)


def copy_weights(
    plan: LinearPlan, ctx: LinearContext, weight_maps, tile: OutputTile, block, stage, full=None
):
    """Load the weights of a stage.

    Args:
        full: the barrier that they complete on; None: that of their part of the stage.
    """
    weight_map = chosen_descriptor(weight_maps, tile.weight)
    for part in range(plan.rings):
        slot = stage * plan.rings + part
        target = ctx.smem.weight_start + slot * (plan.rows * plan.kind.step)
        k_block = (ctx.rank * plan.rings + part) * plan.ring_blocks + block
        place = [0, tile.row_tile * plan.rows, k_block]
        barrier = ctx.pipes.ring.at(slot).full if full is None else full
        tma_load(weight_map, target, place, barrier, ctx.weight_policy)


@cute.jit
def load_activations(
    plan: cutlass.Constexpr, ctx: LinearContext, x_maps, tile: OutputTile, copies, block, stage
):
    """Load the activations of a stage; of CTAs that share them, each a part for all.

    Args:
        x_maps: of whole and of short copies.
        copies: `short_copies` of the tile.
    """
    sharing, elements = plan.tiling.sharing, plan.columns * plan.kind.step
    rows = plan.columns // sharing  # of a whole copy
    share = ctx.scheduler.row_rank if sharing > 1 else 0
    for part in cutlass.range_constexpr(plan.rings):
        slot = stage * plan.rings + part
        start = ctx.smem.x_start + slot * elements
        full = ctx.pipes.ring.at(slot).full
        k_block = (ctx.rank * plan.rings + part) * plan.ring_blocks + block
        k_block += first_x_block(plan, tile)
        column = tile.token_tile * plan.columns
        if cutlass.const_expr(rows == 2 * plan.short_rows and sharing == 1):
            # One copy either way.
            x_map = chosen_descriptor(x_maps, Int32(copies > 0))
            _copy(plan, x_map, start, [0, column, k_block], full)
        elif copies == 0:
            first = share * rows
            target = start + first * plan.kind.step
            _copy(plan, x_maps[0], target, [0, column + first, k_block], full)
        else:
            # As many as a tile has are a whole one.
            most = min(rows, plan.columns - plan.short_rows) // plan.short_rows
            for i in cutlass.range_constexpr(most):
                copy = share * (rows // plan.short_rows) + i
                if copy < copies:
                    first = copy * plan.short_rows
                    target = start + first * plan.kind.step
                    _copy(plan, x_maps[1], target, [0, column + first, k_block], full)


def _copy(plan: LinearPlan, x_map, target, place: list, full) -> None:
    """Load rows of activations, into all CTAs that share them."""
    sharing = plan.tiling.sharing
    if sharing == 1:
        tma_load(x_map, target, place, full)
    else:
        tma_multicast(x_map, target, place, full, (1 << sharing) - 1)
