"""Epilogues of the grouped products of Blackwell: SwiGLU with the routing weight and FP8 codes of
h, or rows of an expert.

A thread has a row of the weights, a channel of the result, and all columns of it, a chunk of eight
at a time. The 128 rows of a tile of gate and up are the channels that share a scale of h.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute, pipeline

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.column_codes import column_codes, column_maxima
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.tcgen05 import fence_after_thread_sync, fence_before_thread_sync, load_lane
from dsv4.kernels.kit.tma import bulk_send
from dsv4.kernels.moe.layout import TILE_ROWS
from dsv4.kernels.moe.sm100.context import ProductContext, WorkTile
from dsv4.kernels.moe.sm100.plan import CHUNK, EPILOGUE_WARPS, NamedBarriers, ProductPlan
from dsv4.kernels.moe.swiglu import swiglu

WARP = 32
COLUMN_BYTES = TILE_ROWS * 4  # of sums
GATE, UP = 0, 1  # ranks of the CTAs that have one of them each of a tile of the shared expert


class Epilogue:
    """The warpgroup that reads sums."""

    def __init__(self, plan: ProductPlan, top_k: int):
        self.plan = plan
        self.top_k = top_k
        self.lane_columns = -(-plan.columns // WARP)

    @cute.jit
    def store_tiles(self, ctx: ProductContext):
        """Store every tile of the CTA."""
        plan, sums, lane = self.plan, ctx.pipes.sums, cute.arch.lane_idx()
        is_first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        if is_first:
            ctx.tmem.allocate(plan.tmem.allocated_columns)
        address = ctx.tmem.start(plan.tmem_users)
        pdl.wait_for_previous_launch()
        if cutlass.const_expr(plan.cluster > 1):
            # The barriers of the other CTA exist from here on.
            cute.arch.cluster_wait()
        scheduler, counts = ctx.schedule(plan), ctx.operands.counts
        words, num_groups, live = scheduler.words(Int32(0)), counts[0], counts[1]
        cursor, turns = sums.consumer(), (Int32(0), Int32(0))
        tile = scheduler.tile(Int32(0), words, live)
        for n in cutlass.range(scheduler.count(num_groups), unroll=1):
            ahead = scheduler.words(n + 1)
            if tile.steps > 0:
                columns = self.load_columns(ctx, tile, lane)
                totals = ()
                if cutlass.const_expr(plan.is_promoted):
                    totals, cursor = self._promote(ctx, tile, address, cursor)
                else:
                    sums.wait(cursor)
                    fence_after_thread_sync()
                start = address + cursor.stage * plan.sum_columns
                turns = self.store_tile(ctx, tile, columns, start, totals, turns)
                if cutlass.const_expr(not plan.is_promoted):
                    fence_before_thread_sync()
                    sums.release(cursor, lane)
                    cursor = sums.next(cursor)
            tile = scheduler.tile(n + 1, ahead, live)
        self.end(ctx, turns)
        # Freed while another warp still reads, the sums would belong to the next CTA of this SM.
        fence_before_thread_sync()
        threads = plan.warps["epilogue"].threads
        pipeline.NamedBarrier(NamedBarriers.TMEM_UNUSED, threads).arrive_and_wait()
        fence_after_thread_sync()
        if is_first:
            ctx.tmem.free(plan.tmem.allocated_columns, address)

    @cute.jit
    def _promote(self, ctx: ProductContext, tile: WorkTile, address: cute.Pointer, cursor: Cursor):
        """Sums of each weight: those of k blocks times the weight's scales, added in the order of
        k; and the next stage of sums."""
        plan, sums, thread = self.plan, ctx.pipes.sums, cute.arch.thread_idx()[0]
        totals = tuple(cute.make_rmem_tensor(CHUNK, Float32) for _ in range(plan.weights))
        for total in totals:
            total.fill(0.0)
        for block in cutlass.range(plan.k_blocks, unroll=1):
            factors = self._weight_scales(ctx, tile, block)
            sums.wait(cursor)
            fence_after_thread_sync()
            start = address + cursor.stage * plan.sum_columns
            self._add(totals[0], start, factors[0], thread)
            if cutlass.const_expr(plan.is_gated):  # noqa: SIM102 static, then dynamic
                if not tile.is_shared:
                    self._add(totals[1], start + plan.columns, factors[1], thread)
            fence_before_thread_sync()
            sums.release(cursor, cute.arch.lane_idx())
            cursor = sums.next(cursor)
        return totals, cursor

    @cute.jit
    def _add(self, total: cute.Tensor, place: cute.Pointer, factor: Float32, thread):
        """Add a row's sums of a k block times a factor."""
        part = load_lane(place, CHUNK, thread)
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(CHUNK):
            total[i] = total[i] + part[i] * factor

    @cute.jit
    def _weight_scales(self, ctx: ProductContext, tile: WorkTile, block):
        """Scales of FP8 weights that the tensor core has not taken; 1 for FP4."""
        plan, operands = self.plan, ctx.operands
        found = ()
        for m in cutlass.range_constexpr(plan.weights):
            scale = Float32(1.0)
            if tile.is_shared:
                # The first sums are those of the one weight that this CTA has.
                own, other = operands.shared_scales[m], operands.shared_scales[1 - m]
                scale = Float32(own[tile.row_tile, block])
                if ctx.rank == UP:
                    scale = Float32(other[tile.row_tile, block])
            elif cutlass.const_expr(plan.expert_dtype == "fp8"):
                scale = Float32(operands.scales[m][tile.expert, tile.row_tile, block])
            found += (scale,)
        return found

    @cute.jit
    def sums(
        self, start: cute.Pointer, totals, weight: cutlass.Constexpr, first, thread,
        columns: cutlass.Constexpr = CHUNK,
    ):  # fmt: skip
        """A row's sums of the first columns of a chunk, there after the fence of TMEM loads."""
        if cutlass.const_expr(self.plan.is_promoted):
            return totals[weight]
        return load_lane(start + weight * self.plan.columns + first, columns, thread)

    def scaled(self, value: Float32, columns: tuple, weight: int) -> Float32:
        """A sum with what the tensor core has not multiplied.

        Args:
            columns: of `load_columns`.
        """
        return value

    def of_column(self, values: tuple, column):
        """What the lane of a column has of it."""
        found = cute.arch.shuffle_sync(values[0], column % WARP)
        for i in range(1, self.lane_columns):
            other = cute.arch.shuffle_sync(values[i], column % WARP)
            found = cutlass.select_(column >= i * WARP, other, found)
        return found

    def end(self, ctx: ProductContext, turns) -> None:
        """Wait for what is still on its way to this CTA."""


class SwiGlu(Epilogue):
    """h = silu(min(gate, limit)) * clamp(up) * routing weight, in bf16, then in e4m3 with a scale
    for each column and 128 channels."""

    def __init__(self, plan: ProductPlan, top_k: int, limit: float):
        super().__init__(plan, top_k)
        self.limit = limit

    @cute.jit
    def load_columns(self, ctx: ProductContext, tile: WorkTile, lane):
        """Routing weights of a lane's columns."""
        factors = ()
        columns = [i * WARP + lane for i in range(self.lane_columns)]
        for column, pair in zip(columns, ctx.places(tile, columns)):
            factor = Float32(1.0)
            if not tile.is_shared and column < tile.count:
                factor = ctx.operands.factors[pair // self.top_k, pair % self.top_k]
            factors += (factor,)
        return factors

    @cute.jit
    def store_tile(
        self, ctx: ProductContext, tile: WorkTile, factors, start: cute.Pointer, totals, turns
    ):
        """Store codes and scales of a tile, or send its sums of up to the CTA that has gate;
        returns the next turns of both exchanges."""
        chunk_turn, up_turn = turns
        if tile.is_shared & (ctx.rank == UP):
            self._send(ctx, tile, start, totals, up_turn)
        else:
            chunk_turn = self._store(ctx, tile, factors, start, totals, turns)
        if tile.is_shared:
            up_turn ^= 1
        return chunk_turn, up_turn

    @cute.jit
    def _store(
        self, ctx: ProductContext, tile: WorkTile, factors, start: cute.Pointer, totals, turns
    ):
        """Store codes and scales of a tile; returns the next turn of the exchange of maxima."""
        pipe, thread = ctx.pipes.up, cute.arch.thread_idx()[0]
        chunk_turn, up_turn = turns
        if tile.is_shared:
            if thread == 0:
                pipe.expect(tile.count * COLUMN_BYTES)
            pipe.wait(up_turn)
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            # With few tokens most experts have one.
            chunk = (ctx, tile, factors, start, totals, first, chunk_turn)
            if tile.count - first == 1:
                self._store_chunk(*chunk, 1)
            else:
                self._store_chunk(*chunk, CHUNK)
            chunk_turn ^= 1
        # Every warp has read its sums of up: the barrier of the last chunk's maxima follows.
        if tile.is_shared and cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(pipe.empty, UP)
        return chunk_turn

    @cute.jit
    def end(self, ctx: ProductContext, turns):
        """The CTA that has up is told when its last sums have been read: it may not end before."""
        if ctx.rank == UP:
            ctx.pipes.up.acquire(turns[1] ^ 1)

    def _place(self, ctx: ProductContext, column, thread) -> cute.Pointer:
        """Address of a row's sum of a column among those of up."""
        return ctx.smem.up + (column * TILE_ROWS + thread)

    @cute.jit
    def _send(self, ctx: ProductContext, tile: WorkTile, start: cute.Pointer, totals, turn):
        """Copy the sums of all rows to the CTA that has gate."""
        thread = cute.arch.thread_idx()[0]
        # The sums before have been copied, and read.
        ctx.pipes.up.acquire(turn ^ 1)
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            values = self.sums(start, totals, 0, first, thread)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(CHUNK):
                self._place(ctx, first + i, thread).store(values[i])
        # The copy reads through another proxy.
        cute.arch.fence_view_async_shared()
        threads = self.plan.warps["epilogue"].threads
        pipeline.NamedBarrier(NamedBarriers.UP_THERE, threads).arrive_and_wait()
        if thread == 0 and tile.count > 0:
            size = tile.count * COLUMN_BYTES
            bulk_send(ctx.smem.up, ctx.smem.up, size, ctx.pipes.up.full, GATE)

    @cute.jit
    def _receive(self, ctx: ProductContext, tile: WorkTile, values: cute.Tensor, first, thread):
        """Read a row's sums of a chunk, zeros of columns without a token."""
        values.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(values)):
            if first + i < tile.count:
                values[i] = self._place(ctx, first + i, thread).load()

    @cute.jit
    def _store_chunk(
        self, ctx: ProductContext, tile: WorkTile, factors, start: cute.Pointer, totals, first,
        turn, columns: cutlass.Constexpr,
    ):  # fmt: skip
        """Codes and scales of the first columns of a chunk."""
        thread = cute.arch.thread_idx()[0]
        gate = self.sums(start, totals, 0, first, thread, columns)
        up = cute.make_rmem_tensor(columns, Float32)
        if tile.is_shared:
            self._receive(ctx, tile, up, first, thread)
        else:
            of_up = self.sums(start, totals, 1, first, thread, columns)
            for i in cutlass.range_constexpr(columns):
                up[i] = of_up[i]
        cute.arch.fence_view_async_tmem_load()
        values = []
        for i in cutlass.range_constexpr(columns):
            factor = self.of_column(factors, first + i)
            both = self.scaled(gate[i], factors, 0), self.scaled(up[i], factors, 1)
            h = swiglu(*both, self.limit) * factor
            values.append(h.to(BFloat16).to(Float32))
        self.store_rounded(ctx, tile, factors, values, first, turn)

    @cute.jit
    def store_rounded(self, ctx: ProductContext, tile: WorkTile, factors, values, first, turn):
        """Codes and scales of a thread's values of some columns."""
        thread = cute.arch.thread_idx()[0]
        place = cute.assume(turn * (EPILOGUE_WARPS * CHUNK), divby=CHUNK)
        board = ctx.smem.amax + place
        maxima = column_maxima(values, board, CHUNK, NamedBarriers.AMAX_THERE)
        codes, scales = column_codes(values, maxima)
        self._store_codes(ctx, tile, codes, scales, first, thread)

    @cute.jit
    def _store_codes(self, ctx: ProductContext, tile: WorkTile, codes, scales, first, thread):
        """Store a channel's codes of a chunk: a warp has 32 channels of a row, which lie side by
        side; and the scales, one thread a row."""
        h, h_scale, pairs = ctx.operands.y, ctx.operands.y_scale, ctx.operands.pairs
        row = tile.first + cutlass.select_(tile.is_shared, Int32(pairs.shape[0]), Int32(0)) + first
        offset = Int64(row) * h.stride[0] + (tile.row_tile * TILE_ROWS + thread)
        for i in cutlass.range_constexpr(len(scales)):
            if first + i < tile.count:
                place = offset + i * h.stride[0]
                pointer_at(h.iterator, place, Uint8, align=1).store(codes[i])
                if thread == i:
                    h_scale[row + i, tile.row_tile] = Uint8(scales[i])


class Rows(Epilogue):
    """Rows of an expert's output, bf16, by token and its place."""

    @cute.jit
    def load_columns(self, ctx: ProductContext, tile: WorkTile, lane):
        """Rows of y of a lane's columns."""
        found = ()
        columns = [i * WARP + lane for i in range(self.lane_columns)]
        for column, pair in zip(columns, ctx.places(tile, columns)):
            token, place = pair // self.top_k, pair % self.top_k
            token = cutlass.select_(tile.is_shared, tile.first + column, token)
            place = cutlass.select_(tile.is_shared, Int32(self.top_k), place)
            found += (token * (self.top_k + 1) + place,)
        return found

    @cute.jit
    def store_tile(
        self, ctx: ProductContext, tile: WorkTile, found, start: cute.Pointer, totals, turns
    ):
        """Store a tile: a warp has 32 channels of a row, which lie side by side."""
        y, thread = ctx.operands.y, cute.arch.thread_idx()[0]
        channel = tile.row_tile * TILE_ROWS + thread
        for first in cutlass.range(0, tile.columns, CHUNK, unroll=1):
            values = self.sums(start, totals, 0, first, thread)
            cute.arch.fence_view_async_tmem_load()
            for i in cutlass.range_constexpr(CHUNK):
                row = self.of_column(found, first + i)
                if first + i < tile.count:
                    offset = Int64(row) * y.stride[0] + channel
                    target = pointer_at(y.iterator, offset, BFloat16, align=2)
                    target.store(self.scaled(values[i], found, 0).to(BFloat16))
        return turns
