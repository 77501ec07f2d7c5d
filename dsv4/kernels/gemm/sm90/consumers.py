"""Consumer warpgroups of the weight-streaming kernel: products, promotion, sums of slices."""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.operands import chosen_matrix, first_x_block
from dsv4.kernels.gemm.plan import M_TILE, LinearPlan
from dsv4.kernels.gemm.quantize import SECOND_TERM
from dsv4.kernels.gemm.sm90.activations import Activations, scale_value
from dsv4.kernels.gemm.sm90.context import LinearContext, sum_fragment, tile_mma
from dsv4.kernels.gemm.sm90.epilogue import Epilogue
from dsv4.kernels.gemm.sm90.short_tiles import clear_missing
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor, Ring
from dsv4.kernels.kit.wgmma import gemm

WARP = 32
WARPGROUP_WARPS = 4
WGMMAS = 4  # of a k block
# Tiles whose weight scales are asked for ahead: a load that stands in line behind weights takes
# longer than the products of a tile.
TILES_AHEAD = 2


class Consumers:
    """Both warpgroups: 64 rows each of a streamed tile, half of a resident tile's slices each."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.activations = Activations(plan)
        self.epilogue = Epilogue(plan)
        # Weight scales of a tile in a warp: its lanes hold some each.
        self.scale_words = -(-plan.ring_blocks // WARP)

    @cute.jit
    def compute(self, ctx: LinearContext, warp, y_maps):
        """Every tile of the CTA: activations, slices, sum of the parts, output."""
        plan, scheduler = self.plan, ctx.scheduler
        lane = cute.arch.lane_idx()
        group, unit = warp // WARPGROUP_WARPS, warp % WARPGROUP_WARPS
        part, ring_part = ctx.rank, Int32(0)
        if cutlass.const_expr(plan.tiling.is_streamed):
            unit = warp
        else:
            part, ring_part = ctx.rank * plan.rings + group, group
        first_block = part * plan.ring_blocks
        stack = [sum_fragment(plan) for _ in range(plan.own_slices.bit_length())]
        here, ahead, cursor = None, [], ctx.pipes.ring.consumer()
        index, last_token_tile, last_x_block = scheduler.index(0), Int32(-1), Int32(0)
        tile, turn = scheduler.coordinates(index), Int32(0)
        loaded = self.epilogue.make_loaded(ctx)
        if cutlass.const_expr(plan.is_quantized):
            here = cute.make_rmem_tensor(self.scale_words, Float32)
            dtype = ctx.operands.scales[0].element_type
            ahead = [cute.make_rmem_tensor(self.scale_words, dtype) for _ in range(TILES_AHEAD)]
            # Scales of the weight, as the weight itself, are not what the launch before writes.
            for n in cutlass.range_constexpr(TILES_AHEAD):
                if scheduler.exists(scheduler.index(n)):
                    self._load_scales(ctx, scheduler.index(n), first_block, lane, ahead[n])
        if cutlass.const_expr(plan.has_streamed_x):
            clear_missing(plan, ctx)
        else:
            self.activations.clear(ctx)
        if cutlass.const_expr(plan.finds_best):
            self.epilogue.best.clear(ctx)
        if cutlass.const_expr(plan.tiling.cluster > 1):
            cute.arch.cluster_wait()
        pdl.wait_for_previous_launch()
        while scheduler.exists(index):
            # ---- prologue ----
            index += scheduler.clusters
            if cutlass.const_expr(plan.is_quantized):
                after = index + (TILES_AHEAD - 1) * scheduler.clusters
                self._next_scales(ctx, here, ahead, after, first_block, lane)
                x_block = first_x_block(plan, tile)
                is_other = tile.token_tile != last_token_tile
                if cutlass.const_expr(plan.group_rows > 0):
                    is_other |= x_block != last_x_block
                if is_other:
                    if cutlass.const_expr(loaded is not None):
                        self.epilogue.load_positions(ctx, tile, loaded)
                    is_first = last_token_tile < 0
                    self.activations.take(ctx, tile.token_tile, x_block, is_first)
                    last_token_tile, last_x_block = tile.token_tile, Int32(x_block)
            if cutlass.const_expr(loaded is not None):
                self.epilogue.load_turns(ctx, tile, unit, loaded)
            self.epilogue.expect_parts(ctx)
            # ---- slices, added as a balanced tree: a subtree has one sum, wherever it is held ----
            for s in cutlass.range_constexpr(plan.own_slices):
                level, merges = plan.tree[s]
                if cutlass.const_expr(plan.is_quantized):
                    slice_of = (here, s, ring_part, group, lane)
                    cursor = self._sum_slice(ctx, stack[level], *slice_of, cursor)
                else:
                    cursor = sum_unscaled_slice(
                        plan, ctx, stack[level], ring_part, group, lane, cursor
                    )
                for m in cutlass.range_constexpr(len(merges)):
                    left, right = stack[merges[m]], stack[merges[m] + 1]
                    for i in cutlass.range_constexpr(cute.size(left)):
                        left[i] = left[i] + right[i]
            # ---- epilogue ----
            has_next = scheduler.exists(index)
            self.epilogue.store(ctx, stack[0], tile, part, unit, turn, has_next, y_maps, loaded)
            if cutlass.const_expr(plan.finds_best):
                self.epilogue.best.end_tile(ctx, tile, index)
            turn ^= 1
            if has_next:
                tile = scheduler.coordinates(index)
        if cutlass.const_expr(self.epilogue.can_stage(ctx.operands.ys)):
            # Shared memory must outlive the reads of the stores.
            self.epilogue.drain()
        if cutlass.const_expr(plan.finds_best):
            self.epilogue.best.finish(ctx)

    @cute.jit
    def _sum_slice(
        self, ctx: LinearContext, sums: cute.Tensor, scales: cute.Tensor, s: cutlass.Constexpr,
        ring_part, group, lane, cursor: Cursor,
    ):  # fmt: skip
        """sums = the products of a slice; returns the next place in the ring."""
        plan = self.plan
        place = (ring_part, group, lane)
        turns, rest = divmod(plan.slice_blocks, plan.run_blocks)
        first = s * plan.slice_blocks
        sums.fill(0.0)
        for turn in cutlass.range(turns, unroll=1):
            run = first + turn * plan.run_blocks, plan.run_blocks
            cursor = self._add_run(ctx, sums, scales, *run, *place, cursor)
        if cutlass.const_expr(rest > 0):
            run = first + turns * plan.run_blocks, rest
            cursor = self._add_run(ctx, sums, scales, *run, *place, cursor)
        return cursor

    @cute.jit
    def _add_run(
        self, ctx: LinearContext, sums: cute.Tensor, scales: cute.Tensor, first,
        count: cutlass.Constexpr, ring_part, group, lane, cursor: Cursor,
    ):  # fmt: skip
        """sums += the products of some k blocks, of which those of up to `blocks_under_way` are
        multiplied at a time; returns the next place in the ring.

        Written out: ptxas waits for each product of its own accord where those of a turn of a loop
        are still under way in the next one.
        """
        mma = tile_mma(self.plan)
        shape = mma.partition_shape_C((M_TILE, self.plan.columns))
        depth = min(self.plan.blocks_under_way, count)
        accs = [mma.make_fragment_C(shape) for _ in range(depth)]
        ahead = cursor
        for i in cutlass.range_constexpr(depth - 1):
            ahead = self._multiply(ctx, accs[i], first + i, ring_part, group, ahead)
        for i in cutlass.range_constexpr(count):
            last = min(i + depth, count) - 1
            if cutlass.const_expr(last == i + depth - 1):
                acc = accs[last % depth]
                ahead = self._multiply(ctx, acc, first + last, ring_part, group, ahead)
            of_block = accs[i % depth], scales, first + i, last - i, ring_part, lane
            cursor = self._add(ctx, sums, *of_block, cursor)
        return cursor

    @cute.jit
    def _multiply(
        self, ctx: LinearContext, acc: cute.Tensor, block, ring_part, group, cursor: Cursor
    ):
        """Start the products of a k block; returns the next place in the ring."""
        plan, ring = self.plan, ctx.pipes.ring
        mma = tile_mma(plan)
        mma_slice = mma.get_slice(0)
        a = mma.make_fragment_A(mma_slice.partition_A(ctx.smem.weight))
        b = mma.make_fragment_B(mma_slice.partition_B(ctx.smem.x))
        ring.wait(cursor, ring_part)
        weight_tile = x_tile = ring.slot(cursor, ring_part)
        if cutlass.const_expr(plan.tiling.is_streamed):
            weight_tile = x_tile * 2 + group
        else:
            x_tile = ring_part * plan.ring_blocks + block
        tiles = a[None, None, None, weight_tile], b[None, None, None, x_tile]
        warpgroup.fence()
        gemm(lambda: tile_mma(plan), acc, *tiles, range(WGMMAS), 0, False)
        warpgroup.commit_group()
        return ring.next(cursor)

    @cute.jit
    def _add(
        self, ctx: LinearContext, sums: cute.Tensor, acc: cute.Tensor, scales: cute.Tensor, block,
        behind: cutlass.Constexpr, ring_part, lane, cursor: Cursor,
    ):  # fmt: skip
        """sums += the products of a k block, once they are there, while those of so many blocks
        behind it are multiplied; returns the next place in the ring."""
        ring = ctx.pipes.ring
        scale, own_block = self._scale(scales, block), ring_part * self.plan.ring_blocks + block
        factors = None
        if cutlass.const_expr(self.plan.blocks_under_way > 1):
            factors = self._factors(ctx, scale, own_block, lane)
        warpgroup.wait_group(behind)
        ring.release(cursor, lane, ring_part)
        if cutlass.const_expr(self.plan.blocks_under_way == 1):
            # Not before: factors of many tokens would take as many registers as their products.
            factors = self._factors(ctx, scale, own_block, lane)
        self._promote(sums, acc, factors)
        return ring.next(cursor)

    def _factors(self, ctx: LinearContext, weight_scale, block, lane) -> list:
        """Activation scale * weight scale of a lane's columns, in a k block of this CTA."""
        scales = ctx.smem.scales
        columns = [n * 8 + lane % 4 * 2 + c for n in range(self.plan.column_groups) for c in (0, 1)]
        return [scales[column, block] * weight_scale for column in columns]

    def _promote(self, sums: cute.Tensor, acc: cute.Tensor, factors: list) -> None:
        """sums += acc * the factor of its column."""
        for n in range(self.plan.column_groups):
            for c in range(2):
                for r in range(2):
                    i = n * 4 + r * 2 + c
                    sums[i] = sums[i] + product(self.plan, acc, n, r, c) * factors[2 * n + c]

    @cute.jit
    def _next_scales(
        self, ctx: LinearContext, here: cute.Tensor, ahead: list, index, first_block, lane
    ):
        """here = weight scales of a tile, of which those of the tiles behind it step up; those of
        tile `index` are asked for."""
        for i in cutlass.range_constexpr(self.scale_words):
            here[i] = scale_value(ahead[0][i])
            for n in cutlass.range_constexpr(1, TILES_AHEAD):
                ahead[n - 1][i] = ahead[n][i]
        if ctx.scheduler.exists(index):
            self._load_scales(ctx, index, first_block, lane, ahead[-1])

    @cute.jit
    def _load_scales(self, ctx: LinearContext, index, first_block, lane, words: cute.Tensor):
        """words[i] of a lane = weight scale, as it is stored, of k block 32 i + lane of this
        warpgroup: a conversion would wait for what is just asked for."""
        plan, scales = self.plan, ctx.operands.scales
        tile = ctx.scheduler.coordinates(index)
        scale = chosen_matrix(scales, tile.weight, scales[0].element_type)
        row = tile.row_tile * plan.rows // K_BLOCK
        for i in cutlass.range_constexpr(self.scale_words):
            block = cutlass.min(i * WARP + lane, plan.ring_blocks - 1)
            words[i] = scale[row, first_block + block]

    def _scale(self, words: cute.Tensor, block):
        """Weight scale of a k block of this warpgroup, from the lane that holds it."""
        word = words[0]
        for i in range(1, self.scale_words):
            word = cutlass.select_(block >= i * WARP, words[i], word)
        return cute.arch.shuffle_sync(word, block % WARP)


def product(plan: LinearPlan, acc: cute.Tensor, n: int, r: int, c: int):
    """Products of a k block of row r and column c of a lane's two of each in group n of tokens: the
    sum of both terms where there are two."""
    if plan.tiling.terms == 1:
        return acc[n * 4 + r * 2 + c]
    return acc[n * 8 + r * 2 + c] + acc[n * 8 + 4 + r * 2 + c] * SECOND_TERM


@cute.jit
def sum_unscaled_slice(
    plan: cutlass.Constexpr, ctx: LinearContext, sums: cute.Tensor, ring_part, group, lane,
    cursor: Cursor,
):  # fmt: skip
    """sums = the products of a slice of bf16, summed by the tensor core alone; returns the next
    place in the ring. Products of one block follow those of the one before without a gap."""
    ring = ctx.pipes.ring
    mma = tile_mma(plan)
    mma_slice = mma.get_slice(0)
    a = mma.make_fragment_A(mma_slice.partition_A(ctx.smem.weight))
    b = mma.make_fragment_B(mma_slice.partition_B(ctx.smem.x))
    sums.fill(0.0)
    for step in cutlass.range(plan.slice_blocks, unroll=1):
        ring.wait(cursor, ring_part)
        x_tile = weight_tile = ring.slot(cursor, ring_part)
        if cutlass.const_expr(plan.tiling.is_streamed):
            weight_tile = x_tile * 2 + group
        warpgroup.fence()
        tiles = a[None, None, None, weight_tile], b[None, None, None, x_tile]
        gemm(lambda: tile_mma(plan), sums, *tiles, range(WGMMAS), 0, True)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if step > 0:
            release(plan, ring, ring.previous(cursor), lane, ring_part)
        cursor = ring.next(cursor)
    warpgroup.wait_group(0)
    release(plan, ring, ring.previous(cursor), lane, ring_part)
    return cursor


def release(plan: LinearPlan, ring: Ring, cursor: Cursor, lane, ring_part) -> None:
    """A warp is done with a stage, which CTAs that share activations fill for each other; only
    products have read it."""
    if plan.tiling.sharing == 1:
        ring.release(cursor, lane, ring_part)
    else:
        ring.release_to(cursor, lane, plan.tiling.sharing, is_read=True)
