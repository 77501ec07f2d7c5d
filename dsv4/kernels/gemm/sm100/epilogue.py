"""Epilogue of Blackwell's linears: sums from TMEM, parts of the CTAs of a cluster, outputs.

A thread has a row of the weight, and all tokens of it.
"""

import cutlass
from cutlass import Float32, Int32, cute, pipeline

from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.operands import OutputTile, chosen_matrix, outputs_by_dtype
from dsv4.kernels.gemm.sm100.best_rows import BestRows
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.head_rotation import RotateHeads
from dsv4.kernels.gemm.sm100.index_tile import IndexTile
from dsv4.kernels.gemm.sm100.plan import MOST_COLUMNS, ROWS, LinearPlan, NamedBarriers
from dsv4.kernels.gemm.sm100.rounded_tile import RoundedTile
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.tcgen05 import (
    fence_after_thread_sync,
    fence_before_thread_sync,
    load_lane,
)

WARP = 32


class Epilogue:
    """The warpgroup that reads sums."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        # Of each weight; others are not applied to outputs by themselves.
        self.own = [
            RotateHeads(config) if isinstance(config, HeadRotation) else None
            for config in plan.epilogues
        ]
        self.rounded, self.best = RoundedTile(plan), BestRows(plan)
        self.index = IndexTile(plan)
        self.columns = min(plan.tokens, MOST_COLUMNS)

    @cute.jit
    def store_tiles(self, ctx: LinearContext):
        """Store every tile of the CTA."""
        plan, sums = self.plan, ctx.pipes.sums
        is_first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        if is_first:
            ctx.tmem.allocate(plan.tmem.allocated_columns)
        address = ctx.tmem.start(plan.tmem_users)
        if cutlass.const_expr(plan.finds_best):
            self.best.clear(ctx)
        pdl.wait_for_previous_launch()
        if cutlass.const_expr(plan.tiling.cluster > 1):
            # The barriers of the other CTAs exist from here on.
            cute.arch.cluster_wait()
        cursor, turn = sums.consumer(), Int32(0)
        for n in cutlass.range(ctx.scheduler.count, unroll=1):
            tile = ctx.scheduler.tile(n)
            self._expect_parts(ctx)
            if cutlass.const_expr(plan.is_promoted):
                cursor = self._store_promoted(ctx, tile, address, cursor, turn)
            else:
                cursor = self._store_sums(ctx, tile, address, cursor, turn)
            if cutlass.const_expr(plan.tiling.cluster > 1):
                self._store_parts(ctx, tile, turn)
            if cutlass.const_expr(plan.finds_best):
                self.best.end_tile(ctx, tile, n)
            turn ^= 1
        if cutlass.const_expr(plan.finds_best):
            self.best.finish(ctx)
        # Freed while another warp still reads, the sums would belong to the next CTA of this SM.
        fence_before_thread_sync()
        threads = plan.warps["epilogue"].threads
        pipeline.NamedBarrier(NamedBarriers.TMEM_UNUSED, threads).arrive_and_wait()
        fence_after_thread_sync()
        if is_first:
            ctx.tmem.free(plan.tmem.allocated_columns, address)

    # ---- sums of the CTA ----

    @cute.jit
    def _store_sums(self, ctx: LinearContext, tile: OutputTile, address, cursor: Cursor, turn):
        """Store, or send, the sums of a tile: those of the CTA's slices added as a balanced tree;
        returns the next stage of sums."""
        plan, sums, thread = self.plan, ctx.pipes.sums, cute.arch.thread_idx()[0]
        sums.wait(cursor)
        fence_after_thread_sync()
        self._acquire_parts(ctx, turn)
        start = address + cursor.stage * plan.sum_columns
        for first in cutlass.range(0, plan.tokens, self.columns, unroll=1):
            slices = []
            for s in cutlass.range_constexpr(plan.own_slices):
                slices.append(load_lane(start + s * plan.columns + first, self.columns, thread))
            cute.arch.fence_view_async_tmem_load()
            values = slices[0]
            for i in cutlass.range_constexpr(self.columns):
                values[i] = tree(lambda a, b: a + b, [part[i] for part in slices])
            self._pass_on(ctx, tile, values, first, turn)
        self._release(ctx, cursor)
        return sums.next(cursor)

    @cute.jit
    def _store_promoted(self, ctx: LinearContext, tile: OutputTile, address, cursor: Cursor, turn):
        """Store, or send, the sums of k blocks times the scales of the weight, added in the order
        of k; returns the next stage of sums."""
        plan, sums, scales = self.plan, ctx.pipes.sums, ctx.operands.scales
        scale = chosen_matrix(scales, tile.weight, Float32)
        total = cute.make_rmem_tensor(plan.tokens, Float32)
        total.fill(0.0)
        for block in cutlass.range(plan.cta_blocks, unroll=1):
            factor = scale[tile.row_tile, ctx.rank * plan.cta_blocks + block]
            sums.wait(cursor)
            fence_after_thread_sync()
            for first in cutlass.range_constexpr(0, plan.tokens, self.columns):
                place = address + cursor.stage * plan.columns + first
                values = load_lane(place, self.columns, cute.arch.thread_idx()[0])
                cute.arch.fence_view_async_tmem_load()
                for i in cutlass.range_constexpr(self.columns):
                    total[first + i] = total[first + i] + values[i] * factor
            self._release(ctx, cursor)
            cursor = sums.next(cursor)
        self._acquire_parts(ctx, turn)
        for first in cutlass.range_constexpr(0, plan.tokens, self.columns):
            part = cute.make_tensor(total.iterator + first, cute.make_layout(self.columns))
            self._pass_on(ctx, tile, part, first, turn)
        return cursor

    @cute.jit
    def _release(self, ctx: LinearContext, cursor: Cursor):
        """Sums of a stage have been read."""
        fence_before_thread_sync()
        ctx.pipes.sums.release(cursor, cute.arch.lane_idx())

    # ---- parts of the CTAs of a cluster ----

    @cute.jit
    def _expect_parts(self, ctx: LinearContext):
        """Announce the bytes of a tile's parts, which all CTAs of the cluster will send."""
        if cutlass.const_expr(ctx.pipes.partials is not None):  # noqa: SIM102 static, then dynamic
            if cute.arch.thread_idx()[0] == 0:
                ctx.pipes.partials.expect(self.plan.partial_bytes)

    @cute.jit
    def _acquire_parts(self, ctx: LinearContext, turn):
        """Wait until all CTAs have added the parts of the tile before."""
        if cutlass.const_expr(ctx.pipes.partials is not None):
            ctx.pipes.partials.acquire(turn ^ 1)

    def _part(self, ctx: LinearContext, part, group) -> cute.Pointer:
        """Address of a thread's values of a group of own tokens."""
        plan, row = self.plan, cute.arch.thread_idx()[0]
        place = (part * (plan.own_tokens // plan.vector) + group) * ROWS + row
        return ctx.smem.partials + cute.assume(place * plan.vector, divby=plan.vector)

    @cute.jit
    def _pass_on(self, ctx: LinearContext, tile: OutputTile, values: cute.Tensor, first, turn):
        """Store a row's values of tokens from `first` on, or send each to the CTA that adds its
        parts."""
        plan = self.plan
        if cutlass.const_expr(plan.tiling.cluster == 1):
            self._store(ctx, tile, values, first, turn)
        else:
            words = cute.recast_tensor(values, Int32)
            for i in cutlass.range_constexpr(0, self.columns, plan.vector):
                token = first + i
                owner, own = token // plan.own_tokens, token % plan.own_tokens
                target = self._part(ctx, ctx.rank, own // plan.vector)
                value = tuple(words[i + j] for j in range(plan.vector))
                cute.arch.store_async_dsmem(target, value, ctx.pipes.partials.full, Int32(owner))

    @cute.jit
    def _store_parts(self, ctx: LinearContext, tile: OutputTile, turn):
        """Add the parts of the own tokens as a balanced tree, and store the sums."""
        plan, partials = self.plan, ctx.pipes.partials
        lane, vector = cute.arch.lane_idx(), plan.vector
        partials.wait(turn)
        for first in cutlass.range_constexpr(0, plan.own_tokens, plan.stored_tokens):
            sums = cute.make_rmem_tensor(plan.stored_tokens, Float32)
            for i in cutlass.range_constexpr(0, plan.stored_tokens, vector):
                parts = []
                for p in cutlass.range_constexpr(plan.tiling.cluster):
                    values = cute.make_rmem_tensor(vector, Float32)
                    source = self._part(ctx, p, (first + i) // vector)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(vector)), values)
                    parts.append(values)
                for j in cutlass.range_constexpr(vector):
                    sums[i + j] = tree(lambda a, b: a + b, [part[j] for part in parts])
            self._store(ctx, tile, sums, ctx.rank * plan.own_tokens + first, turn)
        cute.arch.sync_warp()
        # Each CTA of the cluster may send its parts of the next tile.
        if lane < plan.tiling.cluster:
            cute.arch.mbarrier_arrive(partials.empty, lane)

    # ---- outputs ----

    @cute.jit
    def _store(self, ctx: LinearContext, tile: OutputTile, values: cute.Tensor, first, turn):
        """Round and store a row's values of tokens from `first` on: a warp has 32 rows of a token,
        which lie side by side."""
        thread = cute.arch.thread_idx()[0]
        row, token = tile.row_tile * ROWS + thread, tile.token_tile * self.plan.tokens + first
        if cutlass.const_expr(self.plan.rounds_output):
            self.rounded.store(ctx, tile, values, token, turn)
        elif cutlass.const_expr(self.plan.rounds_heads):
            if self.index.is_here(tile.weight):
                self.index.store(ctx, tile, values, token)
            else:
                self._store_outputs(ctx, tile, values, row, token)
        else:
            if cutlass.const_expr(self.plan.finds_best):
                self.best.take(ctx, tile, values, first)
            self._store_outputs(ctx, tile, values, row, token)

    @cute.jit
    def _store_outputs(self, ctx: LinearContext, tile: OutputTile, values: cute.Tensor, row, token):
        """Store a row's values of tokens from one on, after the epilogue of their weight."""
        ys = ctx.operands.ys
        self._rotate(ctx, tile, values, token)
        for dtype, is_here in outputs_by_dtype(ys, tile.weight):
            y = chosen_matrix(ys, tile.weight, dtype)
            if is_here:
                self._store_row(y, values, row, token)

    @cute.jit
    def _store_row(self, y: cute.Tensor, values: cute.Tensor, row, token):
        """Store a row's values of tokens from one on."""
        rows, tokens = Int32(y.shape[1]), Int32(y.shape[0])
        if row < rows:
            for i in cutlass.range_constexpr(cute.size(values)):
                if token + i < tokens:
                    y[token + i, row] = values[i].to(y.element_type)

    @cute.jit
    def _rotate(self, ctx: LinearContext, tile: OutputTile, values: cute.Tensor, token):
        """Apply the epilogue of a tile's weight, if it has one, in place."""
        ys, thread = ctx.operands.ys, cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(len(self.own)):
            if cutlass.const_expr(self.own[i] is not None):  # noqa: SIM102 static, then dynamic
                if tile.weight == i:
                    y = ys[i]
                    values.store(values.load().to(y.element_type).to(Float32))
                    warp = cute.arch.make_warp_uniform(thread // WARP)
                    row = tile.row_tile * ROWS + warp * WARP
                    sizes = Int32(y.shape[1]), Int32(y.shape[0])
                    self.own[i].apply(ctx.operands.heads[0], i, values, row, token, *sizes)
