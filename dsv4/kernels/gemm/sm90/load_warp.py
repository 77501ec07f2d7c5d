"""Load warp of the weight-streaming kernel: weights, and streamed activations, by TMA."""

import cutlass
from cutlass import cute

from dsv4.kernels.gemm.plan import LinearPlan
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load


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
                self._load_weights(ctx, weight_map, step, step)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(plan.tiling.is_streamed):
                for step in cutlass.range(early, unroll=1):
                    self._load_activations(ctx, x_map, step, step)
            # One turn on: what a consumer waits for next is what this role waits for now.
            cursor = ring.consumer()
            for step in cutlass.range(early, count, unroll=1):
                for part in cutlass.range_constexpr(plan.rings):
                    ring.acquire(cursor, part)
                self._load_weights(ctx, weight_map, step, cursor.stage)
                if cutlass.const_expr(plan.tiling.is_streamed):
                    self._load_activations(ctx, x_map, step, cursor.stage)
                cursor = ring.next(cursor)

    def _coordinates(self, ctx: LinearContext, step, part: int):
        """Output tile of a step, and the k block of a part of its stage."""
        plan = self.plan
        tile = ctx.scheduler.coordinates(ctx.scheduler.index(step // plan.ring_blocks))
        first = (ctx.rank * plan.rings + part) * plan.ring_blocks
        return tile, first + step % plan.ring_blocks

    def _load_weights(self, ctx: LinearContext, weight_map, step, stage):
        """Announce the bytes of a stage, and load its weights."""
        plan = self.plan
        for part in range(plan.rings):
            slot = stage * plan.rings + part
            tile, k_block = self._coordinates(ctx, step, part)
            barriers = ctx.pipes.ring.at(slot)
            barriers.expect(plan.weight_bytes + plan.x_bytes)
            target = ctx.smem.weight_start + slot * plan.weight_bytes
            tma_load(weight_map, target, [0, tile.row_tile * plan.rows, k_block], barriers.full)

    def _load_activations(self, ctx: LinearContext, x_map, step, stage):
        plan = self.plan
        tile, k_block = self._coordinates(ctx, step, 0)
        target = ctx.smem.x_start + stage * plan.x_bytes
        full = ctx.pipes.ring.at(stage).full
        tma_load(x_map, target, [0, tile.token_tile * plan.tokens, k_block], full)
