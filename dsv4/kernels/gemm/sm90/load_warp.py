"""Load warp of the weight-streaming kernel: weights, and streamed activations, by TMA."""

import cutlass
from cutlass import cute

from dsv4.kernels.gemm.plan import LinearPlan
from dsv4.kernels.gemm.sm90.context import LinearContext, OutputTile
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load, tma_multicast


class LoadWarp:
    """Keeps the rings full: weights first, activations when the launch before is over."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: LinearContext, weight_map, x_map):
        """Load the k blocks of every tile; one lane does all of it."""
        plan, ring = self.plan, ctx.pipes.ring
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors((weight_map,))
            if cutlass.const_expr(plan.tiling.is_streamed):
                prefetch_descriptors((x_map,))
            count = ctx.scheduler.count * plan.ring_blocks
            # The launch before writes no weights: see `kit.pdl`. Each stage is empty at first.
            early = cutlass.min(count, plan.stages)
            for step in cutlass.range(early, unroll=1):
                tile, block = self._place(ctx, step)
                load_weights(plan, ctx, weight_map, tile, block, step)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(plan.tiling.is_streamed):
                for step in cutlass.range(early, unroll=1):
                    tile, block = self._place(ctx, step)
                    load_activations(plan, ctx, x_map, tile, block, step)
            # One turn on: what a consumer waits for next is what this role waits for now.
            cursor = ring.consumer()
            for step in cutlass.range(early, count, unroll=1):
                for part in cutlass.range_constexpr(plan.rings):
                    ring.acquire(cursor, part)
                tile, block = self._place(ctx, step)
                load_weights(plan, ctx, weight_map, tile, block, cursor.stage)
                if cutlass.const_expr(plan.tiling.is_streamed):
                    load_activations(plan, ctx, x_map, tile, block, cursor.stage)
                cursor = ring.next(cursor)

    def _place(self, ctx: LinearContext, step):
        """Output tile of a step, and its k block among those of a ring."""
        tile = ctx.scheduler.coordinates(ctx.scheduler.index(step // self.plan.ring_blocks))
        return tile, step % self.plan.ring_blocks


def load_weights(plan: LinearPlan, ctx: LinearContext, weight_map, tile: OutputTile, block, stage):
    """Announce the bytes of a stage, and load its weights."""
    for part in range(plan.rings):
        slot = stage * plan.rings + part
        barriers = ctx.pipes.ring.at(slot)
        barriers.expect(plan.weight_bytes + plan.x_bytes)
        target = ctx.smem.weight_start + slot * plan.weight_bytes
        k_block = (ctx.rank * plan.rings + part) * plan.ring_blocks + block
        tma_load(weight_map, target, [0, tile.row_tile * plan.rows, k_block], barriers.full)


def load_activations(plan: LinearPlan, ctx: LinearContext, x_map, tile: OutputTile, block, stage):
    """Load the activations of a stage; of CTAs that share them, each a part for all."""
    sharing = plan.tiling.sharing
    target = ctx.smem.x_start + stage * plan.x_bytes
    full = ctx.pipes.ring.at(stage).full
    token, k_block = tile.token_tile * plan.tokens, ctx.rank * plan.ring_blocks + block
    if sharing == 1:
        tma_load(x_map, target, [0, token, k_block], full)
    else:
        part = ctx.scheduler.row_rank
        target += part * (plan.x_bytes // sharing)
        token += part * (plan.tokens // sharing)
        tma_multicast(x_map, target, [0, token, k_block], full, (1 << sharing) - 1)
