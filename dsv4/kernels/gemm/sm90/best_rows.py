"""Epilogue of a linear of which the row of each token's largest output is wanted: a head's.

Keys of a warp (`gemm.best_keys`) wait in shared memory while its CTA multiplies other rows of the
same tokens, those of CTAs meet in global memory, and the last CTA to finish reads them and leaves
zeros.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.best_keys import NO_VALUE, key_of, or_none, ordered
from dsv4.kernels.gemm.grid_maxima import GridMaxima
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.plan import CONSUMER_WARPS, LANE_VALUES, LinearPlan
from dsv4.kernels.gemm.sm90.activations import CONSUMERS, sync_consumers
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.kit import pdl

WARP = 32


class BestRows(GridMaxima):
    """The device functions of the epilogue `ArgMax`."""

    warps, threads = CONSUMER_WARPS, CONSUMERS

    def __init__(self, plan: LinearPlan):
        self.tokens = plan.tokens
        self.slots = CONSUMER_WARPS * plan.tokens

    def sync(self) -> None:
        sync_consumers()

    @cute.jit
    def clear(self, ctx: LinearContext):
        """Begin with no value; the consumers meet before they take any."""
        for i in cutlass.range(cute.arch.thread_idx()[0], self.slots, CONSUMERS, unroll=1):
            (ctx.smem.best + i).store(Int64(NO_VALUE))
        sync_consumers()

    @cute.jit
    def take(self, ctx: LinearContext, first_row, first_group, lane, sums: cute.Tensor):
        """Compare a warp's 16 rows of some groups of 8 tokens with those it had before.

        Args:
            sums: [row, token, group] of a lane.
        """
        y, keys = ctx.operands.ys[0], []
        row = first_row + lane // 4
        for n in cutlass.range_constexpr(cute.size(sums) // LANE_VALUES):
            for c in cutlass.range_constexpr(2):
                values = [sums[LANE_VALUES * n + 2 * r + c].to(y.element_type) for r in range(2)]
                low, high = (ordered(value.to(Float32)) for value in values)
                low = or_none(row < y.shape[1], low)
                high = or_none(row + 8 < y.shape[1], high)
                is_low = low >= high
                value = Uint32(cutlass.select_(is_low, low, high))
                place = Int32(cutlass.select_(is_low, row, row + 8))
                keys.append(key_of(value, place))
        first, found, copies = _spread_largest(keys, lane)
        if lane // 4 % copies == 0:
            warp = cute.arch.thread_idx()[0] // WARP
            for i in cutlass.range_constexpr(len(found)):
                term = first + i
                token = (first_group + term // 2) * 8 + lane % 4 * 2 + term % 2
                slot = ctx.smem.best + (warp * self.tokens + token)
                slot.store(cutlass.max(slot.load(), found[i]))

    @cute.jit
    def end_tile(self, ctx: LinearContext, tile: OutputTile, index_after):
        """Hand the maxima on where the CTA's next tile is of other tokens, or there is none."""
        scheduler = ctx.scheduler
        is_last = scheduler.exists(index_after) ^ True
        is_last |= scheduler.coordinates(index_after).token_tile != tile.token_tile
        if is_last:
            self.hand_on(ctx, tile)

    @cute.jit
    def finish(self, ctx: LinearContext):
        """Write the rows in the last CTA."""
        # A CTA without a tile has not waited for the launch before, which may be at these keys.
        pdl.wait_for_previous_launch()
        sync_consumers()
        self.write_rows(ctx)


def _spread_largest(keys: list, lane) -> tuple[Int32, list, int]:
    """Largest keys over the eight lanes of a column, spread over them as `spread_sums` does: the
    first one's index, this lane's, and how many lanes have the same."""
    index, copies = Int32(0), 1
    for offset in (16, 8, 4):
        if len(keys) == 1:
            keys = [cutlass.max(keys[0], _from_lane(keys[0], offset))]
            copies *= 2
            continue
        half = len(keys) // 2
        is_high = lane & offset != 0
        pairs = list(zip(keys[:half], keys[half:]))
        kept = [Int64(cutlass.select_(is_high, high, low)) for low, high in pairs]
        sent = [Int64(cutlass.select_(is_high, low, high)) for low, high in pairs]
        keys = [cutlass.max(a, _from_lane(b, offset)) for a, b in zip(kept, sent)]
        index += Int32(cutlass.select_(is_high, Int32(half), Int32(0)))
    return index, keys, copies


def _from_lane(key: Int64, offset: int) -> Int64:
    """The key of the lane `offset` away, as two words."""
    words = [Int32(key & 0xFFFFFFFF), Int32(key >> 32)]
    low, high = (cute.arch.shuffle_sync_bfly(word, offset=offset) for word in words)
    return Int64(high) << 32 | Int64(Uint32(low))
