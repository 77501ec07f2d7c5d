"""Load warp of the weight-streaming kernel: weights, and streamed activations, by TMA."""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.operands import OutputTile, first_x_block
from dsv4.kernels.gemm.plan import LinearPlan
from dsv4.kernels.gemm.sm90.context import LinearContext
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
    def load(self, ctx: LinearContext, weight_maps, x_map):
        """Load the k blocks of every tile; one lane does all of it."""
        plan, ring = self.plan, ctx.pipes.ring
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors(weight_maps)
            if cutlass.const_expr(plan.has_streamed_x):
                prefetch_descriptors((x_map,))
            count = ctx.scheduler.count * plan.ring_blocks
            # The launch before writes no weights: see `kit.pdl`. Each stage is empty at first.
            early = cutlass.min(count, plan.stages)
            self._fill(ctx, weight_maps, early)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(plan.has_streamed_x):
                self._complete(ctx, x_map, early)
            # One turn on: what a consumer waits for next is what this role waits for now.
            cursor = ring.consumer()
            for step in cutlass.range(early, count, unroll=1):
                for part in cutlass.range_constexpr(plan.rings):
                    ring.acquire(cursor, part)
                tile, block = self._place(ctx, step)
                load_weights(plan, ctx, weight_maps, tile, block, cursor.stage)
                if cutlass.const_expr(plan.has_streamed_x):
                    load_activations(plan, ctx, x_map, tile, block, cursor.stage)
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
            if cutlass.const_expr(filling is None):
                load_weights(plan, ctx, weight_maps, tile, block, step)
            elif step < early - window:
                full = filling.at(step % window).full
                cute.arch.mbarrier_arrive_and_expect_tx(full, plan.rings * plan.weight_bytes)
                copy_weights(plan, ctx, weight_maps, tile, block, step, full)
            else:
                load_weights(plan, ctx, weight_maps, tile, block, step)

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
    def _complete(self, ctx: LinearContext, x_map, early):
        """Load the activations of the first stages, and announce those whose weights are there."""
        plan = self.plan
        for step in cutlass.range(early, unroll=1):
            tile, block = self._place(ctx, step)
            if step < early - plan.window:
                for part in cutlass.range_constexpr(plan.rings):
                    ctx.pipes.ring.expect(step * plan.rings + part, plan.x_bytes)
            load_activations(plan, ctx, x_map, tile, block, step)

    def _place(self, ctx: LinearContext, step):
        """Output tile of a step, and its k block among those of a ring."""
        tile = ctx.scheduler.coordinates(ctx.scheduler.index(step // self.plan.ring_blocks))
        return tile, step % self.plan.ring_blocks


def load_weights(plan: LinearPlan, ctx: LinearContext, weight_maps, tile: OutputTile, block, stage):
    """Announce the bytes of a stage, and load its weights."""
    for part in range(plan.rings):
        ctx.pipes.ring.expect(stage * plan.rings + part, plan.weight_bytes + plan.x_bytes)
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


def load_activations(plan: LinearPlan, ctx: LinearContext, x_map, tile: OutputTile, block, stage):
    """Load the activations of a stage; of CTAs that share them, each a part for all."""
    sharing, elements = plan.tiling.sharing, plan.columns * plan.kind.step
    for part in range(plan.rings):
        slot = stage * plan.rings + part
        target = ctx.smem.x_start + slot * elements
        full = ctx.pipes.ring.at(slot).full
        column = tile.token_tile * plan.columns
        k_block = (ctx.rank * plan.rings + part) * plan.ring_blocks + block
        k_block += first_x_block(plan, tile)
        if sharing == 1:
            tma_load(x_map, target, [0, column, k_block], full)
        else:
            share = ctx.scheduler.row_rank
            target += share * (elements // sharing)
            column += share * (plan.columns // sharing)
            tma_multicast(x_map, target, [0, column, k_block], full, (1 << sharing) - 1)
