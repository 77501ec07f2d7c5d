"""Epilogue of a linear of which the row of each token's largest output is wanted: a head's.

An output is a key, ordered as the values are and below them by descending rows, so that the largest
key is that of the first row with the largest value. Maxima are exact in any order: those of a warp
wait in shared memory while its CTA multiplies other rows of the same tokens, those of CTAs meet in
global memory, and the last CTA to finish reads them and leaves zeros, which are below all keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.epilogues import COUNTER_WORDS, KEY_WORDS
from dsv4.kernels.gemm.plan import CONSUMER_WARPS, LANE_VALUES, LinearPlan
from dsv4.kernels.gemm.sm90.activations import CONSUMERS, sync_consumers
from dsv4.kernels.gemm.sm90.context import LinearContext, OutputTile
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.pointers import pointer_at

WARP = 32
ROW_BITS = 31
LAST_ROW = (1 << ROW_BITS) - 1
INFINITY = 0x7F800000  # in fp32
# Upper parts of keys.
NO_VALUE, INFINITY_BELOW, NAN = 0, 0x007FFFFF, 0xFFFFFFFF
FAILED = -1


class BestOperands(NamedTuple):
    """Tensors of the epilogue."""

    rows: cute.Tensor  # [T] int64, written: the row of the largest output, or -1
    workspace: cute.Tensor  # zeros

    def key(self, token) -> cute.Pointer:
        """That of a token."""
        base = cute.recast_ptr(self.workspace.iterator, dtype=Int64)
        return pointer_at(base, Int64(COUNTER_WORDS // KEY_WORDS) + token, Int64, align=8)


class BestRows:
    """The device functions of the epilogue `ArgMax`."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.slots = CONSUMER_WARPS * plan.tokens

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
                low, high = (_ordered(value.to(Float32)) for value in values)
                low = _or_none(row < y.shape[1], low)
                high = _or_none(row + 8 < y.shape[1], high)
                is_low = low >= high
                value = Uint32(cutlass.select_(is_low, low, high))
                place = Int32(cutlass.select_(is_low, row, row + 8))
                keys.append(_key(value, place))
        first, found, copies = _spread_largest(keys, lane)
        if lane // 4 % copies == 0:
            warp = cute.arch.thread_idx()[0] // WARP
            for i in cutlass.range_constexpr(len(found)):
                term = first + i
                token = (first_group + term // 2) * 8 + lane % 4 * 2 + term % 2
                slot = ctx.smem.best + (warp * self.plan.tokens + token)
                slot.store(cutlass.max(slot.load(), found[i]))

    @cute.jit
    def end_tile(self, ctx: LinearContext, tile: OutputTile, index_after):
        """Hand the maxima on where the CTA's next tile is of other tokens, or there is none."""
        scheduler, tokens = ctx.scheduler, self.plan.tokens
        is_last = scheduler.exists(index_after) ^ True
        is_last |= scheduler.coordinates(index_after).token_tile != tile.token_tile
        if is_last:
            best = ctx.operands.best[0]
            sync_consumers()
            for own in cutlass.range(cute.arch.thread_idx()[0], tokens, CONSUMERS, unroll=1):
                found = Int64(NO_VALUE)
                for warp in cutlass.range_constexpr(CONSUMER_WARPS):
                    slot = ctx.smem.best + (warp * tokens + own)
                    found = cutlass.max(found, slot.load())
                    slot.store(Int64(NO_VALUE))
                token = tile.token_tile * tokens + own
                if token < best.rows.shape[0]:
                    cute.arch.atomic_max(best.key(token), found, sem="relaxed", scope="gpu")
            sync_consumers()

    @cute.jit
    def finish(self, ctx: LinearContext):
        """Write the rows, if all other CTAs have handed on what they had.

        The atomic releases and acquires at GPU scope; the barriers extend that to all consumers.
        """
        best, thread = ctx.operands.best[0], cute.arch.thread_idx()[0]
        counter = pointer_at(best.workspace.iterator, Int64(0), Int32, align=4)
        flag = cute.recast_ptr(ctx.smem.best, dtype=Int32)
        # A CTA without a tile has not waited for the launch before, which may be at these keys.
        pdl.wait_for_previous_launch()
        sync_consumers()
        if thread == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            flag.store(Int32(before == cute.arch.grid_dim()[0] - 1))
        sync_consumers()
        if flag.load() != 0:
            for token in cutlass.range(thread, best.rows.shape[0], CONSUMERS, unroll=1):
                key = cute.arch.load(best.key(token), Int64, sem="relaxed", scope="gpu")
                best.key(token).store(Int64(NO_VALUE))
                best.rows[token] = _row(key)
            if thread == 0:
                counter.store(Int32(0))


def _ordered(value: Float32) -> Uint32:
    """Bits that are ordered as values are; NaN above all others, and both zeros the same."""
    bits = value.bitcast(Int32)
    magnitude = bits & Int32(0x7FFFFFFF)
    bits = Int32(cutlass.select_(magnitude == 0, Int32(0), bits))
    ordered = Uint32(bits ^ (bits >> 31 | Int32(-(2**31))))
    return Uint32(cutlass.select_(magnitude > Int32(INFINITY), Uint32(NAN), ordered))


def _or_none(condition, value: Uint32) -> Uint32:
    return Uint32(cutlass.select_(condition, value, Uint32(NO_VALUE)))


def _key(value: Uint32, row: Int32) -> Int64:
    return Int64(value) << ROW_BITS | Int64(Int32(LAST_ROW) - row)


@cute.jit
def _row(key: Int64) -> Int64:
    """Row of a key; `FAILED` for NaN and minus infinity."""
    value = key >> ROW_BITS
    row = Int64(LAST_ROW) - (key & LAST_ROW)
    has_failed = (value == NAN) | (value <= INFINITY_BELOW)
    return Int64(cutlass.select_(has_failed, Int64(FAILED), row))


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
