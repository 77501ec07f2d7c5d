"""Epilogue of a linear of which the row of each token's largest output is wanted: a head's.

Keys of a warp (`gemm.best_keys`) wait in shared memory while its CTA multiplies other rows of the
same tokens, those of CTAs meet in global memory, and the last CTA to finish reads them and leaves
zeros.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline

from dsv4.kernels.gemm.best_keys import LAST_ROW, NO_VALUE, key_of, or_none, ordered
from dsv4.kernels.gemm.grid_maxima import GridMaxima
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import EPILOGUE_WARPS, ROWS, LinearPlan, NamedBarriers

WARP = 32


class BestRows(GridMaxima):
    """The device functions of the epilogue `ArgMax`."""

    warps, threads = EPILOGUE_WARPS, EPILOGUE_WARPS * WARP

    def __init__(self, plan: LinearPlan):
        self.tokens = plan.tokens
        self.slots = EPILOGUE_WARPS * plan.tokens

    def sync(self) -> None:
        pipeline.NamedBarrier(NamedBarriers.BEST_THERE, self.threads).arrive_and_wait()

    @cute.jit
    def clear(self, ctx: LinearContext):
        """Begin with no value, each lane in the slots that it alone writes."""
        lane, warp = cute.arch.lane_idx(), cute.arch.thread_idx()[0] // WARP
        for i in cutlass.range(lane, self.tokens, WARP, unroll=1):
            (ctx.smem.best + (warp * self.tokens + i)).store(Int64(NO_VALUE))

    @cute.jit
    def take(self, ctx: LinearContext, tile: OutputTile, sums: cute.Tensor, first):
        """Compare a warp's 32 rows of some tokens with those it had before; a lane has the token
        of its number.

        Args:
            sums: of the thread's row.
            first: token of the tile.
        """
        y, thread = ctx.operands.ys[0], cute.arch.thread_idx()[0]
        lane, row = cute.arch.lane_idx(), tile.row_tile * ROWS + thread
        value, place = Uint32(NO_VALUE), Int32(LAST_ROW)
        for i in cutlass.range_constexpr(cute.size(sums)):
            own = ordered(sums[i].to(y.element_type).to(Float32))
            own = or_none(row < y.shape[1], own)
            largest = cute.arch.warp_redux_sync(own, "max")
            candidate = Int32(cutlass.select_(own == largest, row, Int32(LAST_ROW)))
            lowest = cute.arch.warp_redux_sync(candidate, "min")
            value = Uint32(cutlass.select_(lane == i, largest, value))
            place = Int32(cutlass.select_(lane == i, lowest, place))
        if lane < cute.size(sums):
            slot = ctx.smem.best + (thread // WARP * self.tokens + first + lane)
            slot.store(cutlass.max(slot.load(), key_of(value, place)))

    @cute.jit
    def end_tile(self, ctx: LinearContext, tile: OutputTile, n):
        """Hand the maxima on where the CTA's next tile is of other tokens, or the n-th is its last
        one."""
        scheduler = ctx.scheduler
        is_last = n + 1 == scheduler.count
        if is_last ^ True:
            is_last = scheduler.tile(n + 1).token_tile != tile.token_tile
        if is_last:
            self.hand_on(ctx, tile)

    @cute.jit
    def finish(self, ctx: LinearContext):
        """Write the rows in the last CTA."""
        # Behind the barrier of the last tile's maxima, which all threads have handed on.
        self.write_rows(ctx)
