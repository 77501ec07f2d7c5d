"""Softmax warpgroups of attention: 128 queries each, a row a thread.

A step of a warpgroup takes the scores of a tile, raises the rows' maxima, scales the sums of the
tiles before where a row of a warp has a new one, and writes the codes of weights. A thread has a
whole row: nothing is exchanged between lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from dsv4.kernels.attention.softmax import exp2_in_branch
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.tcgen05 import fence_after_thread_sync, fence_before_thread_sync
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.config import P_OFFSET, QuantizedAttentionConfig
from dsv4.kernels.lowp.rounding import fmax_nan
from dsv4.kernels.lowp.sm100.context import AttentionContext, columns_of
from dsv4.kernels.lowp.sm100.epilogue import Epilogue
from dsv4.kernels.lowp.sm100.mask import MaskRow, masked
from dsv4.kernels.lowp.sm100.plan import GROUPS, AttentionPlanSm100, NamedBarriers
from dsv4.kernels.lowp.sm100.queries import Queries
from dsv4.kernels.lowp.sm100.softmax import (
    CHUNK,
    SMALLEST_FACTOR,
    RowState,
    clear_unseen,
    encode,
    hide_unseen,
    raised_top,
    weigh,
)
from dsv4.kernels.lowp.sm100.tmem_rows import load_row, store_row
from dsv4.kernels.lowp.turns import Turns
from dsv4.kernels.lowp.work import Operands, Work, listed

SCALES = 4  # of keys, of a load
TURNS = Turns(NamedBarriers.TURNS, GROUPS)


class Tile(NamedTuple):
    """A tile of keys, as a row sees it.

    Attributes:
        number, place, scored: of the tile among those that its work tile passes, among all of its
            keys, and among all so far.
        limit: keys of the tile that the row sees.
        is_whole: whether all rows of the warpgroup see all of them.
        mask: the row's place in the call's mask.
    """

    number: Int32
    place: Int32
    scored: Int32
    limit: Int32
    is_whole: Boolean
    mask: MaskRow | None


class SoftmaxWarps:
    """Both warpgroups."""

    make_queries = Queries

    def __init__(self, config: QuantizedAttentionConfig, plan: AttentionPlanSm100):
        self.config = config
        self.plan = plan
        self.queries = self.make_queries(config, plan)
        self.epilogue = Epilogue(config, plan)
        self.has_mask = config.mask != "none"
        # Scales of a tile's keys that are factors on its scores.
        self.key_scales = 0 if plan.key_scales else config.key_scales

    @cute.jit
    def compute(self, ctx: AttentionContext, warp):
        """Outputs of every work tile of the CTA."""
        plan, lane, group = self.plan, cute.arch.lane_idx(), warp // 4
        state = RowState.make()
        keys = ctx.pipes.keys.consumer()
        scored = Int32(0)  # tiles so far
        parity, index = Int32(0), Int32(cute.arch.block_idx()[0])
        stop = ctx.tiles.count(ctx.operands)
        # The last one passes the first turn, and the first one takes the last that is passed.
        if group == GROUPS - 1:
            TURNS.give(group)
        while index < stop:
            ctx.pipes.queries.wait(parity)
            work = Work.load(ctx.smem.works[None, parity])
            share = ctx.tiles.share(work, group)
            count = cute.arch.make_warp_uniform(share.count)
            state.reset()
            factor = Float32(0.0)
            if count > 0:
                factor = self.queries.take(ctx, work, warp, lane)
            elif not plan.shares_rows:
                ctx.pipes.queries.release(lane)
            first = share.seen + (warp % 4 * 32 + lane if ctx.tiles.is_causal else 0)
            mask = None
            if cutlass.const_expr(self.has_mask):
                mask = MaskRow.of(ctx.operands, work, warp * 32 + lane)
            scales = self._key_scale(ctx.operands, work)
            following = Int32(0)  # of the mask's list
            if cutlass.const_expr(self.has_mask):
                words = ctx.tiles.list_of(ctx.operands, work)
                if count > 0:
                    following = listed(words, Int32(0))
                ahead = self._load_scales(ctx.operands, scales, following, following + 1)
            else:
                ahead = self._load_scales(ctx.operands, scales, 0, work.count)
            for tile in cutlass.range(count, unroll=1):
                factors = tuple(fmax_nan(factor * x, Float32(SMALLEST_FACTOR)) for x in ahead)
                number = tile
                if cutlass.const_expr(self.has_mask):
                    number, following = following, listed(words, cutlass.min(tile + 1, count - 1))
                    ahead = self._load_scales(ctx.operands, scales, following, following + 1)
                else:
                    ahead = self._load_scales(ctx.operands, scales, tile + 1, work.count)
                limit = cutlass.min(first, work.keys) - number * plan.tile_keys
                seen = Tile(tile, number, scored, limit, tile < share.full, mask)
                self._step(ctx, state, factors, seen, group, keys)
                scored += 1
                if cutlass.const_expr(plan.has_row_scales):
                    keys = ctx.pipes.keys.next(keys)
            # ---- tiles that the other warpgroup's queries see ----
            for _tile in cutlass.range(count, work.count, unroll=1):
                if cutlass.const_expr(plan.has_row_scales):
                    ctx.pipes.keys.wait(keys)
                    ctx.pipes.keys.release(keys, lane)
                    keys = ctx.pipes.keys.next(keys)
                TURNS.take(group)
                TURNS.give(group)
            if count > 0:
                ctx.pipes.sums.at(group).wait((scored + 1) % 2)
                fence_after_thread_sync()
            if cutlass.const_expr(plan.shares_rows):
                ctx.pipes.queries.release(lane)
            self.epilogue.store(ctx, state, count > 0, warp, lane, parity)
            parity ^= 1
            index += cute.arch.grid_dim()[0]
        if group == 0:
            TURNS.take(group)
        self._free(ctx, warp)

    @cute.jit
    def _free(self, ctx: AttentionContext, warp):
        """Return the columns, when no warp reads them any more."""
        fence_before_thread_sync()
        threads = self.plan.warps["softmax"].threads
        cute.arch.barrier(barrier_id=NamedBarriers.TMEM_UNUSED, number_of_threads=threads)
        fence_after_thread_sync()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(ctx.tmem, self.plan.tmem.allocated_columns)

    @cute.jit
    def _step(
        self, ctx: AttentionContext, state: RowState, factors, tile: Tile, group, keys: Cursor
    ):
        """Weights of a tile.

        Args:
            factors: on products, by the part of the tile's keys.
        """
        products, factors = self._scores(ctx, factors, tile, group, keys)
        top = raised_top(products, state, factors, P_OFFSET[self.config.pv])
        self._raise_maximum(ctx, state, top, tile, group)
        size = self.plan.tile_keys
        weights = cute.make_rmem_tensor(size, Float32)
        codes = cute.make_rmem_tensor(size * self.plan.weight_bytes // 4, Float32)
        TURNS.take(group, [top])
        # While the special function unit is at work, the weights before are coded.
        for first in cutlass.range_constexpr(0, size + CHUNK, CHUNK):
            if cutlass.const_expr(first < size):
                weigh(products, weights, state, factors, first)
                if cutlass.const_expr(products.element_type is Int32):  # noqa: SIM102 as above
                    if not tile.is_whole:
                        clear_unseen(weights, tile.limit, first)
            if cutlass.const_expr(first + CHUNK == size):
                TURNS.give(group, [weights[size - 1]])
            if cutlass.const_expr(first > 0):
                encode(weights, codes, state, first - CHUNK, self.plan.pv == "fp16")
        self._store_codes(ctx, codes)
        self._signal_weights(ctx, group)

    @cute.jit
    def _scores(self, ctx: AttentionContext, factors, tile: Tile, group, keys: Cursor):
        """Products of a row with a tile of keys, those that it does not see marked, and the factors
        on them that are left."""
        lane = cute.arch.lane_idx()
        products = self._load_products(ctx, group, tile.scored % 2, lane, keys)
        if cutlass.const_expr(self.has_mask):
            mask = ctx.operands.attn_mask
            products = masked(products, mask, tile.mask, factors, tile.limit, tile.place)
            factors = (Float32(1.0),)
        else:
            if not tile.is_whole:
                hide_unseen(products, tile.limit)
        return products, factors

    @cute.jit
    def _raise_maximum(self, ctx: AttentionContext, state: RowState, top, tile: Tile, group):
        """Make what a row has so far relative to its new maximum."""
        if tile.number > 0:
            # The product with the weights before is over: it may be their turn to be overwritten.
            ctx.pipes.sums.at(group).wait((tile.scored + 1) % 2)
            fence_after_thread_sync()
        # Where no row of a warp has a new maximum, sums are scaled by 1.
        if cute.arch.vote_any_sync(top > state.top[0]):
            decay = exp2_in_branch(state.top[0] - top)
            state.total[0] = state.total[0] * decay
            state.top[0] = top
            if tile.number > 0:
                self._scale_sums(columns_of(ctx, self.plan, "sums", group), decay)

    @cute.jit
    def _signal_weights(self, ctx: AttentionContext, group):
        """Let the tensor core have scaled sums and codes."""
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        # The tensor core reads codes through the async proxy.
        cute.arch.fence_view_async_shared()
        ctx.pipes.weights.at(group).arrive(cute.arch.lane_idx())

    @cute.jit
    def _store_codes(self, ctx: AttentionContext, codes: cute.Tensor):
        """Write a row's codes of weights where products read them."""
        row, span_bytes = cute.arch.thread_idx()[0], self.plan.weight_span
        start, vectors = (
            cute.recast_ptr(ctx.smem.weights_start, dtype=Uint8),
            span_bytes // VECTOR_BYTES,
        )
        # Spans of 64 bytes are permuted by the pair of rows.
        turn = row // (8 // vectors) % vectors
        for i in cutlass.range_constexpr(
            self.plan.tile_keys * self.plan.weight_bytes // VECTOR_BYTES
        ):
            span, part = i // vectors, i % vectors
            place = (row * span_bytes) + ((part ^ turn) * VECTOR_BYTES)
            place = place + span * self.plan.weight_span_bytes
            offset = cute.assume(place, divby=VECTOR_BYTES)
            target = cute.recast_ptr(start + offset, dtype=Float32)
            vector = cute.make_tensor(codes.iterator + 4 * i, cute.make_layout(4))
            cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def _scale_sums(self, start: cute.Pointer, decay: Float32):
        """The row's sums relative to its new maximum: a chunk is loaded while the one before is
        scaled."""
        dim = self.plan.dim
        sums = [cute.make_rmem_tensor(CHUNK, Float32) for _ in range(dim // CHUNK)]
        load_row(start, sums[0])
        for i in cutlass.range_constexpr(dim // CHUNK):
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(i + 1 < dim // CHUNK):
                load_row(start + (i + 1) * CHUNK, sums[i + 1])
            for j in cutlass.range_constexpr(0, CHUNK, 2):
                pair = cute.arch.mul_packed_f32x2((sums[i][j], sums[i][j + 1]), (decay, decay))
                sums[i][j], sums[i][j + 1] = pair
            store_row(start + i * CHUNK, sums[i])

    @cute.jit
    def _load_products(
        self, ctx: AttentionContext, group, phase, lane, keys: Cursor
    ) -> cute.Tensor:
        """Products of a row with a tile of keys, times the scales of keys that have one each."""
        start = columns_of(ctx, self.plan, "scores", group)
        ctx.pipes.scores.at(group).wait(phase)
        fence_after_thread_sync()
        dtype = Int32 if self.plan.qk == "int8" else Float32
        size = self.plan.tile_keys
        products = cute.make_rmem_tensor(size, dtype)
        load_row(start, products)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        ctx.pipes.scores.at(group).release(lane)
        if cutlass.const_expr(self.plan.has_row_scales):
            ctx.pipes.keys.wait(keys)
            scales = cute.make_tensor(
                ctx.smem.key_scales[None, keys.stage].iterator,
                cute.make_layout((SCALES, size // SCALES)),
            )
            for first in cutlass.range_constexpr(0, size, CHUNK):
                some = cute.make_rmem_tensor((SCALES, CHUNK // SCALES), Float32)
                for j in cutlass.range_constexpr(CHUNK // SCALES):
                    cute.autovec_copy(scales[None, first // SCALES + j], some[None, j])
                for i in cutlass.range_constexpr(0, CHUNK, 2):
                    pair = (products[first + i], products[first + i + 1])
                    pair = cute.arch.mul_packed_f32x2(pair, (some[i], some[i + 1]))
                    products[first + i], products[first + i + 1] = pair
            ctx.pipes.keys.release(keys, lane)
        return products

    def _key_scale(self, operands: Operands, work: Work) -> Int64:
        """Address of the scales of the first tile of a work tile's keys."""
        scale = operands.k_scale
        offset = Int64(work.batch) * scale.stride[0] + Int64(work.key_head) * scale.stride[1]
        return address_of(scale, offset + Int64(work.first_tile) * scale.stride[2])

    def _load_scales(self, operands: Operands, start: Int64, tile, count) -> tuple[Float32, ...]:
        """Scales of the keys of a tile, or of the last one; 1 of keys that have one each."""
        if self.key_scales == 0:
            return (Float32(1.0),)
        last = Int64(cutlass.max(cutlass.min(tile, count - 1), 0))
        start = start + last * (Int64(operands.k_scale.stride[2]) * 4)
        places = (pointer_to(start + 4 * i, Float32, 4) for i in range(self.key_scales))
        return tuple(place.load() for place in places)
