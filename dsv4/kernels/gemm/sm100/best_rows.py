"""Epilogue of a linear of which the row of each token's largest output is wanted: a head's.

Keys of a warp (`gemm.best_keys`) wait in shared memory while its CTA multiplies other rows of the
same tokens, those of CTAs meet in global memory, and the last CTA to finish reads them and leaves
zeros.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline

from dsv4.kernels.gemm.best_keys import LAST_ROW, NO_VALUE, key_of, or_none, ordered, row_of
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import EPILOGUE_WARPS, ROWS, LinearPlan, NamedBarriers
from dsv4.kernels.kit.pointers import pointer_at

WARP = 32
THREADS = EPILOGUE_WARPS * WARP


def sync_epilogue() -> None:
    """Named barrier of the warpgroup."""
    pipeline.NamedBarrier(NamedBarriers.BEST_THERE, THREADS).arrive_and_wait()


class BestRows:
    """The device functions of the epilogue `ArgMax`."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.slots = EPILOGUE_WARPS * plan.tokens

    @cute.jit
    def clear(self, ctx: LinearContext):
        """Begin with no value, each lane in the slots that it alone writes."""
        lane, warp = cute.arch.lane_idx(), cute.arch.thread_idx()[0] // WARP
        for i in cutlass.range(lane, self.plan.tokens, WARP, unroll=1):
            (ctx.smem.best + (warp * self.plan.tokens + i)).store(Int64(NO_VALUE))

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
            slot = ctx.smem.best + (thread // WARP * self.plan.tokens + first + lane)
            slot.store(cutlass.max(slot.load(), key_of(value, place)))

    @cute.jit
    def end_tile(self, ctx: LinearContext, tile: OutputTile, n):
        """Hand the maxima on where the CTA's next tile is of other tokens, or the n-th is its last
        one."""
        scheduler, tokens = ctx.scheduler, self.plan.tokens
        is_last = n + 1 == scheduler.count
        if is_last ^ True:
            is_last = scheduler.tile(n + 1).token_tile != tile.token_tile
        if is_last:
            best = ctx.operands.best[0]
            sync_epilogue()
            for own in cutlass.range(cute.arch.thread_idx()[0], tokens, THREADS, unroll=1):
                found = Int64(NO_VALUE)
                for warp in cutlass.range_constexpr(EPILOGUE_WARPS):
                    slot = ctx.smem.best + (warp * tokens + own)
                    found = cutlass.max(found, slot.load())
                    slot.store(Int64(NO_VALUE))
                token = tile.token_tile * tokens + own
                if token < best.rows.shape[0]:
                    cute.arch.atomic_max(best.key(token), found, sem="relaxed", scope="gpu")
            sync_epilogue()

    @cute.jit
    def finish(self, ctx: LinearContext):
        """Write the rows, if all other CTAs have handed on what they had.

        The atomic releases and acquires at GPU scope; the barriers extend that to the warpgroup.
        """
        best, thread = ctx.operands.best[0], cute.arch.thread_idx()[0]
        counter = pointer_at(best.workspace.iterator, Int64(0), Int32, align=4)
        flag = cute.recast_ptr(ctx.smem.best, dtype=Int32)
        # Behind the barrier of the last tile's maxima, which all threads have handed on.
        if thread == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            flag.store(Int32(before == cute.arch.grid_dim()[0] - 1))
        sync_epilogue()
        if flag.load() != 0:
            for token in cutlass.range(thread, best.rows.shape[0], THREADS, unroll=1):
                key = cute.arch.load(best.key(token), Int64, sem="relaxed", scope="gpu")
                best.key(token).store(Int64(NO_VALUE))
                best.rows[token] = row_of(key)
            if thread == 0:
                counter.store(Int32(0))
