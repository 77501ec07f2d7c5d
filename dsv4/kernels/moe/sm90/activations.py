"""Activation warps of a grouped product: tokens of a tile into the ring, beside the weights.

Codes are gathered from L2 by token, or made of bf16 rows on the way. Columns that no token uses are
left as they are: a column of a product reads no other.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.quantize import PAIRS, TEAM, VECTOR, quantize_vector
from dsv4.kernels.gemm.sm90.activations import scale_value
from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.moe.layout import K_BLOCK
from dsv4.kernels.moe.plan import ACTIVATION_WARPS, TILE_ROWS, Kind, ProductPlan
from dsv4.kernels.moe.sm90.context import ProductContext, WorkTile, read_schedule

WARP = 32
BATCH = 4  # loads of a lane under way
BLOCK_VECTORS = K_BLOCK // VECTOR_BYTES


class ActivationWarps:
    """Each fills every `ACTIVATION_WARPS`-th stage with codes and scales.

    Args:
        plan: of the product; it says whether rows are quantised.
        top_k: experts of a token.
    """

    def __init__(self, plan: ProductPlan, top_k: int):
        self.plan = plan
        self.top_k = top_k

    @cute.jit
    def clear(self, ctx: ProductContext):
        """Zero codes and scales, with all threads: columns without a token are never written."""
        plan = self.plan
        zeros = cute.make_rmem_tensor(4, Uint32)
        zeros.fill(0)
        for start, size in (
            (ctx.smem.x, plan.smem["x"].bytes), (ctx.smem.x_scale, plan.smem["x_scale"].bytes),
        ):  # fmt: skip
            base = cute.recast_ptr(start, dtype=Uint32)
            vectors, thread = size // VECTOR_BYTES, cute.arch.thread_idx()[0]
            for i in cutlass.range(thread, vectors, plan.warps.threads, unroll=1):
                target = base + cute.assume(i * 4, divby=4)
                cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))
        # wgmma reads them through the async proxy.
        cute.arch.fence_view_async_shared()

    @cute.jit
    def fill(self, ctx: ProductContext, warp):
        """Fill the stages of every tile; `warp` counts within the role."""
        plan, ring = self.plan, ctx.pipes.ring
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        scheduler = read_schedule(ctx, plan)
        cursor, turn = ring.producer(), Int32(0)
        slot = ctx.cta
        tile = scheduler.find(slot)
        rows = self._rows(ctx, tile, lane)
        while scheduler.exists(slot):
            slot = scheduler.next(slot)
            ahead = scheduler.find(slot)
            rows_ahead = self._rows(ctx, ahead, lane)
            if tile.is_shared:
                cursor, turn = self._fill_tile(
                    ctx, plan.shared, True, tile, rows, warp, lane, cursor, turn
                )
            else:
                cursor, turn = self._fill_tile(
                    ctx, plan.routed, False, tile, rows, warp, lane, cursor, turn
                )
            tile, rows = ahead, rows_ahead

    @cute.jit
    def _rows(self, ctx: ProductContext, tile: WorkTile, lane):
        """Row of x for column `lane` of a tile."""
        pairs = ctx.operands.pairs
        row = tile.first + lane
        if cutlass.const_expr(self.plan.quantizes):
            if tile.is_shared:
                row += pairs.shape[0]
        else:
            is_pair = not tile.is_shared
            if is_pair and lane < tile.count:
                row = pairs[row] // self.top_k
        return row

    @cute.jit
    def _fill_tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, rows, warp, lane, cursor: Cursor, turn,
    ):  # fmt: skip
        ring = ctx.pipes.ring
        for step in cutlass.range(kind.steps, unroll=1):
            if turn == warp:
                ring.acquire(cursor)
                if cutlass.const_expr(self.plan.quantizes):
                    self._quantize(ctx, kind, tile, rows, lane, step, cursor.stage)
                else:
                    self._copy(ctx, kind, tile, rows, lane, step, cursor.stage)
                if cutlass.const_expr(kind.dtype == "fp8"):
                    self._load_block_scales(ctx, is_shared, tile, lane, step, cursor.stage)
                # wgmma reads codes through the async proxy.
                cute.arch.fence_view_async_shared()
                ring.at(cursor.stage).commit(lane)
            cursor = ring.next(cursor)
            turn = cutlass.select_(turn == ACTIVATION_WARPS - 1, Int32(0), turn + 1)
        return cursor, turn

    @cute.jit
    def _copy(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step, stage
    ):
        """Codes and scales of a stage as they lie."""
        plan, x, x_scale = self.plan, ctx.operands.x, ctx.operands.x_scale
        first_block = step * kind.blocks
        vectors = tile.count * (kind.blocks * BLOCK_VECTORS)
        for start in cutlass.range(0, vectors, WARP * BATCH, unroll=1):
            words = cute.make_rmem_tensor((4, BATCH), Uint32)
            words.fill(0)
            for i in cutlass.range_constexpr(BATCH):
                index = start + i * WARP + lane
                column, block = self._column(index // BLOCK_VECTORS, kind)
                row = cute.arch.shuffle_sync(rows, column)
                if index < vectors and first_block + block < plan.k_blocks:
                    offset = Int64(row) * x.stride[0] + (first_block + block) * K_BLOCK
                    offset += index % BLOCK_VECTORS * VECTOR_BYTES
                    source = pointer_at(x.iterator, offset, Uint32)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words[None, i])
            for i in cutlass.range_constexpr(BATCH):
                index = start + i * WARP + lane
                if index < vectors:
                    column, block = self._column(index // BLOCK_VECTORS, kind)
                    target = self._code_address(
                        ctx, kind, stage, column, block, index % BLOCK_VECTORS
                    )
                    pointer = cute.recast_ptr(target, dtype=Uint32)
                    cute.autovec_copy(
                        words[None, i], cute.make_tensor(pointer, cute.make_layout(4))
                    )
        scales = tile.count * kind.blocks
        for start in cutlass.range(0, scales, WARP, unroll=1):
            index = start + lane
            column, block = self._column(index, kind)
            row = cute.arch.shuffle_sync(rows, column)
            if index < scales and first_block + block < plan.k_blocks:
                value = scale_value(x_scale[row, first_block + block])
                self._scale_address(ctx, kind, stage, column, block).store(value)

    @cute.jit
    def _quantize(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step, stage
    ):
        """Codes and scales of a stage of bf16 rows, 16 lanes a group of 128."""
        plan, x = self.plan, ctx.operands.x
        first_block = step * kind.blocks
        team, member, teams = lane // TEAM, lane % TEAM, WARP // TEAM
        groups = tile.count * kind.blocks
        for start in cutlass.range(0, groups, teams * BATCH, unroll=1):
            words = cute.make_rmem_tensor((PAIRS, BATCH), Uint32)
            words.fill(0)
            for i in cutlass.range_constexpr(BATCH):
                index = start + i * teams + team
                column, block = self._column(index, kind)
                row = cute.arch.shuffle_sync(rows, column)
                if index < groups and first_block + block < plan.k_blocks:
                    offset = Int64(row) * x.stride[0] + (first_block + block) * K_BLOCK
                    source = pointer_at(x.iterator, offset + member * VECTOR, Uint32)
                    cute.autovec_copy(
                        cute.make_tensor(source, cute.make_layout(PAIRS)), words[None, i]
                    )
            for i in cutlass.range_constexpr(BATCH):
                index = start + i * teams + team
                codes, scale = quantize_vector(words[None, i])
                if index < groups:
                    column, block = self._column(index, kind)
                    target = self._code_address(ctx, kind, stage, column, block, member // 2)
                    half = cute.assume(member % 2 * (VECTOR_BYTES // 2), divby=VECTOR_BYTES // 2)
                    pointer = cute.recast_ptr(target + half, dtype=Uint32)
                    cute.autovec_copy(codes, cute.make_tensor(pointer, cute.make_layout(2)))
                    if member == 0:
                        address = self._scale_address(ctx, kind, stage, column, block)
                        address.store(quant.unpack_e8m0(scale))

    @cute.jit
    def _load_block_scales(
        self, ctx: ProductContext, is_shared: cutlass.Constexpr, tile: WorkTile, lane, step, stage
    ):
        """FP8 weight scales of a stage: one for each panel."""
        operands = ctx.operands
        if lane < 2:
            value = Float32(0.0)
            row = tile.row_tile
            if cutlass.const_expr(not self.plan.quantizes):
                # A row tile has 64 rows of each weight.
                row = tile.row_tile // (2 * K_BLOCK // TILE_ROWS)
            if cutlass.const_expr(is_shared):
                value = scale_value(operands.shared_a_scale[row, step])
                if lane == 1:
                    value = scale_value(operands.shared_b_scale[row, step])
            else:
                value = scale_value(operands.a_scale[tile.expert, row, step])
                if lane == 1:
                    value = scale_value(operands.b_scale[tile.expert, row, step])
            (ctx.smem.block_scale + (stage * 2 + lane)).store(value)

    def _column(self, index, kind: Kind):
        """Column and k block of a stage of a group of 128."""
        return (index, Int32(0)) if kind.blocks == 1 else (index // 2, index % 2)

    def _code_address(self, ctx: ProductContext, kind: Kind, stage, column, block, vector):
        """Where the swizzle has 16 codes."""
        row = stage * self.plan.x_rows + block * kind.tokens + column
        offset = row * K_BLOCK + (vector ^ (column % 8)) * VECTOR_BYTES
        return ctx.smem.x + cute.assume(offset, divby=VECTOR_BYTES)

    def _scale_address(self, ctx: ProductContext, kind: Kind, stage, column, block):
        return ctx.smem.x_scale + (stage * self.plan.x_rows + block * kind.tokens + column)
