"""Load warp of Blackwell's linears: weights, and streamed activations, by TMA."""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.operands import first_x_block
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import ROWS, LinearPlan
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import chosen_descriptor, prefetch_descriptors, tma_load


class LoadWarp:
    """Producer of the ring: weights first, activations when the launch before is over."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: LinearContext, weight_maps, x_map):
        """Load the k blocks of every tile; one lane does all of it."""
        plan, ring = self.plan, ctx.pipes.ring
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors((*weight_maps, x_map) if plan.has_streamed_x else weight_maps)
            count = ctx.scheduler.count * plan.cta_blocks
            # The launch before writes no weights: see `kit.pdl`. Each stage is empty at first.
            early = cutlass.min(count, plan.stages)
            for step in cutlass.range(early, unroll=1):
                self._load_weights(ctx, weight_maps, step, step)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(plan.has_streamed_x):
                for step in cutlass.range(early, unroll=1):
                    self._load_x(ctx, x_map, step, step)
            # One turn on: what a consumer waits for next is what this role waits for now.
            cursor = ring.consumer()
            for step in cutlass.range(early, count, unroll=1):
                ring.acquire(cursor)
                self._load_weights(ctx, weight_maps, step, cursor.stage)
                if cutlass.const_expr(plan.has_streamed_x):
                    self._load_x(ctx, x_map, step, cursor.stage)
                cursor = ring.next(cursor)

    def _load_weights(self, ctx: LinearContext, weight_maps, step, stage) -> None:
        """Announce the bytes of a stage, and load its weights."""
        tile, k_block = place(self.plan, ctx, step)
        barriers = ctx.pipes.ring.at(stage)
        barriers.expect(self.plan.loaded_bytes)
        target = ctx.smem.weight + stage * self.plan.weight_bytes
        weight_map = chosen_descriptor(weight_maps, tile.weight)
        tma_load(weight_map, target, [0, tile.row_tile * ROWS, k_block], barriers.full)

    def _load_x(self, ctx: LinearContext, x_map, step, stage) -> None:
        """Load the activations of a stage."""
        tile, k_block = place(self.plan, ctx, step)
        k_block += first_x_block(self.plan, tile)
        target = ctx.smem.x + stage * self.plan.x_bytes
        row = tile.token_tile * (self.plan.tokens * self.plan.tiling.terms)
        tma_load(x_map, target, [0, row, k_block], ctx.pipes.ring.at(stage).full)


def place(plan: LinearPlan, ctx: LinearContext, step):
    """Output tile of a step of a CTA, and its k block of K."""
    tile = ctx.scheduler.tile(step // plan.cta_blocks)
    return tile, ctx.rank * plan.cta_blocks + Int32(step % plan.cta_blocks)
