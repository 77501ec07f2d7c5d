"""Load warp of the weight-streaming kernel: weights, and streamed activations, by TMA."""

import cutlass
from cutlass import cute

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
            for step in cutlass.range(early, unroll=1):
                tile, block = self._place(ctx, step)
                load_weights(plan, ctx, weight_maps, tile, block, step)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(plan.has_streamed_x):
                for step in cutlass.range(early, unroll=1):
                    tile, block = self._place(ctx, step)
                    load_activations(plan, ctx, x_map, tile, block, step)
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

    def _place(self, ctx: LinearContext, step):
        """Output tile of a step, and its k block among those of a ring."""
        tile = ctx.scheduler.coordinates(ctx.scheduler.index(step // self.plan.ring_blocks))
        return tile, step % self.plan.ring_blocks


def load_weights(plan: LinearPlan, ctx: LinearContext, weight_maps, tile: OutputTile, block, stage):
    """Announce the bytes of a stage, and load its weights."""
    weight_map = chosen_descriptor(weight_maps, tile.weight)
    for part in range(plan.rings):
        slot = stage * plan.rings + part
        barriers = ctx.pipes.ring.at(slot)
        barriers.expect(plan.weight_bytes + plan.x_bytes)
        target = ctx.smem.weight_start + slot * (plan.rows * plan.kind.step)
        k_block = (ctx.rank * plan.rings + part) * plan.ring_blocks + block
        place = [0, tile.row_tile * plan.rows, k_block]
        tma_load(weight_map, target, place, barriers.full, ctx.weight_policy)


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
