"""Load warp of the FP8 linear of Blackwell: weights, and codes of activations, by TMA."""

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import ROWS, LinearPlan
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load


class LoadWarp:
    """Producer of the ring: weights first, activations when the launch before is over."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: LinearContext, weight_map, x_map):
        """Load the k blocks of every tile; one lane does all of it."""
        plan, ring = self.plan, ctx.pipes.ring
        has_codes = plan.tiling.is_streamed
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors((weight_map, x_map) if has_codes else (weight_map,))
            count = ctx.scheduler.count * plan.cta_blocks
            # The launch before writes no weights: see `kit.pdl`. Each stage is empty at first.
            early = cutlass.min(count, plan.stages)
            for step in cutlass.range(early, unroll=1):
                self._load_weights(ctx, weight_map, step, step)
            pdl.wait_for_previous_launch()
            if cutlass.const_expr(has_codes):
                for step in cutlass.range(early, unroll=1):
                    self._load_codes(ctx, x_map, step, step)
            # One turn on: what a consumer waits for next is what this role waits for now.
            cursor = ring.consumer()
            for step in cutlass.range(early, count, unroll=1):
                ring.acquire(cursor)
                self._load_weights(ctx, weight_map, step, cursor.stage)
                if cutlass.const_expr(has_codes):
                    self._load_codes(ctx, x_map, step, cursor.stage)
                cursor = ring.next(cursor)

    def _load_weights(self, ctx: LinearContext, weight_map, step, stage) -> None:
        """Announce the bytes of a stage, and load its weights."""
        tile, k_block = place(self.plan, ctx, step)
        barriers = ctx.pipes.ring.at(stage)
        barriers.expect(self.plan.loaded_bytes)
        target = ctx.smem.weight + stage * self.plan.weight_bytes
        tma_load(weight_map, target, [0, tile.row_tile * ROWS, k_block], barriers.full)

    def _load_codes(self, ctx: LinearContext, x_map, step, stage) -> None:
        """Load the activations of a stage."""
        tile, k_block = place(self.plan, ctx, step)
        target = ctx.smem.x + stage * self.plan.x_bytes
        token = tile.token_tile * self.plan.tokens
        tma_load(x_map, target, [0, token, k_block], ctx.pipes.ring.at(stage).full)


def place(plan: LinearPlan, ctx: LinearContext, step):
    """Output tile of a step of a CTA, and its k block of K."""
    tile = ctx.scheduler.tile(step // plan.cta_blocks)
    return tile, ctx.rank * plan.cta_blocks + Int32(step % plan.cta_blocks)


assert ROWS == K_BLOCK
