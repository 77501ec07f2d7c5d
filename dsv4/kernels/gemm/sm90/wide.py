"""Consumers of tiles of many tokens, where tensor cores are the bound, and the warps that feed
them."""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.operands import OutputTile, chosen_matrix, first_x_block
from dsv4.kernels.gemm.plan import LANE_VALUES, M_TILE, UNIT_ROWS, LinearPlan
from dsv4.kernels.gemm.quantize import SECOND_TERM
from dsv4.kernels.gemm.sm90.activations import scale_value
from dsv4.kernels.gemm.sm90.consumers import (
    WARP,
    WARPGROUP_WARPS,
    WGMMAS,
    sum_unscaled_slice,
)
from dsv4.kernels.gemm.sm90.context import LinearContext, sum_fragment, tile_mma
from dsv4.kernels.gemm.sm90.epilogue import Epilogue
from dsv4.kernels.gemm.sm90.load_warp import load_activations, load_weights
from dsv4.kernels.gemm.sm90.short_tiles import clear_missing, short_copies
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.tma import prefetch_descriptors
from dsv4.kernels.kit.wgmma import gemm

WARPGROUP = WARP * WARPGROUP_WARPS


class WideLoadWarp:
    """Producer of the ring: weights first, activations when the launch before is over."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: LinearContext, weight_maps, x_maps):
        """Load the k blocks of every tile; one lane does all of it."""
        plan, ring, scheduler = self.plan, ctx.pipes.ring, ctx.scheduler
        if cute.arch.lane_idx() == 0:
            prefetch_descriptors((*weight_maps, *x_maps))
            index = scheduler.index(0)
            tile = scheduler.coordinates(index)
            copies = short_copies(ctx, tile)
            first = Int32(min(plan.stages, plan.ring_blocks))
            if not scheduler.exists(index):
                first = Int32(0)
            # The launch before writes no weights: see `kit.pdl`. Each stage is empty at first.
            for block in cutlass.range(first, unroll=1):
                load_weights(plan, ctx, weight_maps, tile, copies, block, block)
            pdl.wait_for_previous_launch()
            for block in cutlass.range(first, unroll=1):
                load_activations(plan, ctx, x_maps, tile, copies, block, block)
            cursor = ring.skip(ring.producer(), first)
            while scheduler.exists(index):
                tile = scheduler.coordinates(index)
                copies = short_copies(ctx, tile)
                for block in cutlass.range(first, plan.ring_blocks, unroll=1):
                    ring.acquire(cursor)
                    load_weights(plan, ctx, weight_maps, tile, copies, block, cursor.stage)
                    load_activations(plan, ctx, x_maps, tile, copies, block, cursor.stage)
                    cursor = ring.next(cursor)
                first = Int32(0)
                index += scheduler.clusters


class ScaleWarp:
    """Scales of products: every lane those of some tokens, for each k block."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.lane_tokens = plan.tokens // WARP

    @cute.jit
    def load(self, ctx: LinearContext):
        """Write activation scale * weight scale of every k block into its stage; those of the next
        one are on their way meanwhile."""
        plan, ring, scheduler = self.plan, ctx.pipes.ring, ctx.scheduler
        count, lane, operands = self.lane_tokens, cute.arch.lane_idx(), ctx.operands
        pdl.wait_for_previous_launch()
        # As they are stored: a conversion would wait for what was just asked for.
        stored = cute.make_rmem_tensor(count, operands.x_scale.element_type)
        weight_scale = cute.make_rmem_tensor(1, operands.scales[0].element_type)
        values = cute.make_rmem_tensor(count, Float32)
        index, cursor = scheduler.index(0), ring.producer()
        tile = scheduler.coordinates(index)
        if scheduler.exists(index):
            self._read(ctx, tile, Int32(0), lane, stored, weight_scale)
        while scheduler.exists(index):
            index += scheduler.clusters
            tile_after = scheduler.coordinates(index)
            for block in cutlass.range(plan.ring_blocks, unroll=1):
                factor = scale_value(weight_scale[0])
                for i in cutlass.range_constexpr(count):
                    values[i] = scale_value(stored[i]) * factor
                if block + 1 < plan.ring_blocks:
                    self._read(ctx, tile, block + 1, lane, stored, weight_scale)
                elif scheduler.exists(index):
                    self._read(ctx, tile_after, Int32(0), lane, stored, weight_scale)
                ring.acquire(cursor)
                start = cute.assume(cursor.stage * plan.tokens + lane * count, divby=count)
                target = ctx.smem.scales.iterator + start
                cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(count)))
                ring.at(cursor.stage).commit(lane)
                cursor = ring.next(cursor)
            tile = tile_after

    @cute.jit
    def _read(self, ctx: LinearContext, tile: OutputTile, block, lane, stored, weight_scale):
        """Scales of a lane's tokens, and of the weight's rows, in a k block of this CTA. Tokens and
        rows past the last one take its scale: their products are zero, and not stored."""
        plan, operands = self.plan, ctx.operands
        k_block = ctx.rank * plan.ring_blocks + block
        x_block = k_block + first_x_block(plan, tile)
        scale = chosen_matrix(operands.scales, tile.weight, operands.scales[0].element_type)
        row = cutlass.min(tile.row_tile * plan.rows // K_BLOCK, scale.shape[0] - 1)
        weight_scale[0] = scale[row, k_block]
        first = tile.token_tile * plan.tokens + lane * self.lane_tokens
        for i in cutlass.range_constexpr(self.lane_tokens):
            token = cutlass.min(first + i, operands.x_scale.shape[0] - 1)
            stored[i] = operands.x_scale[token, x_block]


class WideConsumers:
    """Two warpgroups, 64 of a tile's M each: of scaled products tokens, or codes of them, else rows
    of the weight.

    Registers hold the products of a k block, the sum of a slice and the first level of the stack of
    sums; other levels of the stack wait in shared memory. Without scales all levels are in
    registers.
    """

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.epilogue = Epilogue(plan)

    @cute.jit
    def compute(self, ctx: LinearContext, warp, y_maps):
        """Every tile of the CTA: slices, sum of the parts, output."""
        plan, scheduler = self.plan, ctx.scheduler
        group, lane = warp // WARPGROUP_WARPS, cute.arch.lane_idx()
        mma = tile_mma(plan)
        acc = mma.make_fragment_C(mma.partition_shape_C((M_TILE, plan.rows)))
        levels = plan.own_slices.bit_length() - plan.spilled_levels
        stack = [sum_fragment(plan) for _ in range(levels)]
        cursor, turn = ctx.pipes.ring.consumer(), Int32(0)
        index = scheduler.index(0)
        loaded = self.epilogue.make_loaded(ctx)
        if cutlass.const_expr(plan.finds_best):
            self.epilogue.best.clear(ctx)
        clear_missing(plan, ctx)
        if cutlass.const_expr(plan.tiling.ctas > 1):
            cute.arch.cluster_wait()
        while scheduler.exists(index):
            tile = scheduler.coordinates(index)
            index += scheduler.clusters
            if cutlass.const_expr(loaded is not None):
                self.epilogue.load_positions(ctx, tile, loaded)
            self.epilogue.expect_parts(ctx)
            for s in cutlass.range_constexpr(plan.own_slices):
                level, merges = plan.tree[s]
                sums = stack[min(level, len(stack) - 1)]
                if cutlass.const_expr(plan.has_tokens_in_m):
                    cursor = self._sum_slice(ctx, sums, acc, warp, cursor)
                else:
                    cursor = sum_unscaled_slice(plan, ctx, sums, Int32(0), group, lane, cursor)
                for m in cutlass.range_constexpr(len(merges)):
                    self._merge(ctx, stack, merges[m], group)
                if cutlass.const_expr(0 < level - len(merges) <= plan.spilled_levels):
                    # Outputs of the tile before have left the memory since.
                    self.epilogue.reclaim(group)
                    self._spill(ctx, stack[-1], level - len(merges), group)
            has_next = scheduler.exists(index)
            rank = ctx.rank
            self.epilogue.store(ctx, stack[0], tile, rank, warp, turn, has_next, y_maps, loaded)
            if cutlass.const_expr(plan.finds_best):
                self.epilogue.best.end_tile(ctx, tile, index)
            turn ^= 1
        if cutlass.const_expr(self.epilogue.can_stage(ctx.operands.ys)):
            # Shared memory must outlive the reads of the stores.
            self.epilogue.drain()
        if cutlass.const_expr(plan.finds_best):
            self.epilogue.best.finish(ctx)

    @cute.jit
    def _sum_slice(
        self, ctx: LinearContext, sums: cute.Tensor, acc: cute.Tensor, warp, cursor: Cursor
    ):
        """sums = the products of a slice; returns the next place in the ring.

        A stage is given back when the products of the next one are on their way, into registers
        that its own ones have left: nothing of it is read any more.
        """
        plan, ring = self.plan, ctx.pipes.ring
        sharing, lane = plan.tiling.sharing, cute.arch.lane_idx()
        # The first products are added to a zero that no register holds. Not where CTAs share the
        # slices of a tile and wait for L2: wo_b of 256 tokens took 22.3 us so, 21.6 with a loop.
        written_out = 1 if plan.parts == 1 else 0
        if cutlass.const_expr(written_out):
            self._multiply(ctx, acc, warp, cursor)
            self._add(ctx, sums, acc, warp, cursor, is_first=True)
            cursor = ring.next(cursor)
        else:
            sums.fill(0.0)
        for block in cutlass.range(written_out, plan.slice_blocks, unroll=1):
            self._multiply(ctx, acc, warp, cursor)
            if block > 0:
                ring.release_to(ring.previous(cursor), lane, sharing, is_read=True)
            self._add(ctx, sums, acc, warp, cursor, is_first=False)
            cursor = ring.next(cursor)
        ring.release_to(ring.previous(cursor), lane, sharing)
        return cursor

    def _multiply(self, ctx: LinearContext, acc: cute.Tensor, warp, cursor: Cursor) -> None:
        """Send the products of a k block on their way."""
        mma, group = tile_mma(self.plan), warp // WARPGROUP_WARPS
        mma_slice = mma.get_slice(0)
        a = mma.make_fragment_A(mma_slice.partition_A(ctx.smem.x))
        b = mma.make_fragment_B(mma_slice.partition_B(ctx.smem.weight))
        ctx.pipes.ring.wait(cursor)
        warpgroup.fence()
        tiles = a[None, None, None, cursor.stage * 2 + group], b[None, None, None, cursor.stage]
        gemm(lambda: tile_mma(self.plan), acc, *tiles, range(WGMMAS), 0, False)
        warpgroup.commit_group()

    def _add(self, ctx: LinearContext, sums, acc, warp, cursor: Cursor, is_first: bool) -> None:
        """sums += the products of a k block * its scales; the first one's take their place."""
        factors = self._factors(ctx, cursor.stage, warp, cute.arch.lane_idx())
        warpgroup.wait_group(0)
        self._promote(sums, acc, factors, is_first)

    def _factors(self, ctx: LinearContext, stage, warp, lane) -> list:
        """Scales of a lane's tokens of a stage."""
        rows = UNIT_ROWS // self.plan.tiling.terms  # tokens of a warp
        tokens = [warp * rows + lane // 4 + first for first in range(0, rows, 8)]
        return [ctx.smem.scales[token, stage] for token in tokens]

    def _promote(self, sums, acc, factors: list, is_first: bool) -> None:
        """sums += acc * the scales of the tokens, the first ones with a constant 0 for sums; of two
        terms, both of a token are a lane's."""
        for n in range(cute.size(acc) // LANE_VALUES):
            for c in range(2):
                found = [acc[LANE_VALUES * n + 2 * r + c] for r in range(2)]
                if self.plan.tiling.terms == 2:
                    found = [found[0] + found[1] * SECOND_TERM]
                for r, (value, factor) in enumerate(zip(found, factors)):
                    i = (n * len(found) + r) * 2 + c
                    before = Float32(0.0) if is_first else sums[i]
                    sums[i] = before + value * factor

    @cute.jit
    def _merge(self, ctx: LinearContext, stack: list, level: cutlass.Constexpr, group):
        """Level = level + the one above. A spilled level is read into the registers of the one
        above."""
        last = len(stack) - 1
        if cutlass.const_expr(0 < level <= self.plan.spilled_levels):
            sums = stack[last]
            for v in cutlass.range_constexpr(cute.size(sums) // 4):
                left = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(self._spilled(ctx, level, v, group), left)
                for i in cutlass.range_constexpr(4):
                    sums[4 * v + i] = left[i] + sums[4 * v + i]
        else:
            left, right = stack[level], stack[min(level + 1, last)]
            left.store(left.load() + right.load())

    @cute.jit
    def _spill(self, ctx: LinearContext, sums: cute.Tensor, level: cutlass.Constexpr, group):
        """Write a level of the stack to the thread's place in shared memory."""
        for v in cutlass.range_constexpr(cute.size(sums) // 4):
            values = cute.make_tensor(sums.iterator + 4 * v, cute.make_layout(4))
            cute.autovec_copy(values, self._spilled(ctx, level, v, group))

    def _spilled(self, ctx: LinearContext, level: int, vector: int, group) -> cute.Tensor:
        """Four values of a spilled level of this thread."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        vectors = M_TILE * self.plan.tokens // (4 * WARPGROUP)
        index = ((level - 1) * vectors + vector) * WARPGROUP + thread
        target = self.epilogue.own_spills(ctx, group) + cute.assume(4 * index, divby=4)
        return cute.make_tensor(target, cute.make_layout(4))
