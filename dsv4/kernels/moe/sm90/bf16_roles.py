"""Roles of a grouped product that has bf16 products among its kinds: tokens as they are, sums of a
whole K by the tensor core.

Arithmetic, the same in every tiling: a chain of wgmma steps of 16 elements over all of K, in order,
in fp32; of NVFP4 weights e2m1 * e4m3, which is exact in bf16, then the sum times the matrix's fp32
scale. Kinds in e4m3, as the shared expert may be, are those of `Consumers`.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.kernels.kit.gather import copy_vector
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES
from dsv4.kernels.kit.wgmma import gemm, make_mma
from dsv4.kernels.moe.bf16_layout import PATTERN_EXPONENT, SCALE_EXPONENT
from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS
from dsv4.kernels.moe.plan import ACTIVATION_WARPS, Kind
from dsv4.kernels.moe.sm90.activations import ActivationWarps, row_of
from dsv4.kernels.moe.sm90.bf16_fragments import PART_STEPS, PARTS, WARP, RowWords
from dsv4.kernels.moe.sm90.consumers import Consumers
from dsv4.kernels.moe.sm90.context import ProductContext, WorkTile

SPAN_VECTORS = SPAN_BYTES // VECTOR_BYTES
BLOCK_VECTORS = 2 * SPAN_VECTORS  # of a token's k block
# What the sums of decoded NVFP4 weights are too small by.
LIFT = 2.0 ** -(PATTERN_EXPONENT + SCALE_EXPONENT)
UP, GATE, DOWN = 1, 0, 2  # rows of the matrices' scales


def bf16_mma(kind: Kind):
    """wgmma of 64 rows of the weight, in registers, and a tile of tokens."""
    shape = (2 * PANEL_ROWS, kind.tokens)
    return make_mma(BFloat16, shape, OperandMajorMode.K, is_a_in_registers=True)


class Bf16Activations(ActivationWarps):
    """Each fills every `ACTIVATION_WARPS`-th stage; rows of bf16 products are copied."""

    @cute.jit
    def _fill_stages(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, rows, warp, lane, cursor: Cursor, turn,
    ):  # fmt: skip
        if cutlass.const_expr(kind.is_bf16):
            ring = ctx.pipes.ring
            for step in cutlass.range(tile.steps(kind), unroll=1):
                if turn == warp:
                    self._copy_rows(ctx, kind, tile, rows, lane, step, cursor)
                    ring.at(cursor.stage).commit(lane)
                cursor = ring.next(cursor)
                turn = cutlass.select_(turn == ACTIVATION_WARPS - 1, Int32(0), turn + 1)
        else:
            cursor, turn = ActivationWarps._fill_stages(
                self, ctx, kind, is_shared, tile, rows, warp, lane, cursor, turn
            )
        return cursor, turn

    @cute.jit
    def _copy_rows(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step,
        cursor: Cursor,
    ):  # fmt: skip
        """bf16 rows of a stage as they lie; the copies arrive at the stage's mbarrier."""
        x = ctx.operands.x
        ctx.pipes.ring.acquire(cursor)
        vectors = tile.count * (kind.blocks * BLOCK_VECTORS)
        for start in cutlass.range(0, vectors, WARP, unroll=4):
            index = start + lane
            column, block = self._column(index // BLOCK_VECTORS, kind)
            row = row_of(rows, column, kind)
            k_block = step * kind.blocks + block
            if index < vectors and k_block < self.plan.k_blocks:
                vector = index % BLOCK_VECTORS
                offset = Int64(row) * x.stride[0] + k_block * K_BLOCK
                source = pointer_at(x.iterator, offset + vector * (VECTOR_BYTES // 2), Uint32)
                target = self._vector_address(ctx, kind, cursor.stage, column, block, vector)
                copy_vector(Int32(target.toint()), source.toint(), Int32(VECTOR_BYTES))
        cute.arch.cp_async_mbarrier_arrive_noinc(ctx.pipes.ring.full + cursor.stage)

    def _vector_address(self, ctx: ProductContext, kind: Kind, stage, column, block, vector):
        """Where the swizzle has eight elements."""
        span = block * 2 + vector // SPAN_VECTORS
        row = stage * self.plan.x_rows + span * kind.tokens + column
        offset = row * SPAN_BYTES + (vector % SPAN_VECTORS ^ column % 8) * VECTOR_BYTES
        return ctx.smem.x + cute.assume(offset, divby=VECTOR_BYTES)


class Bf16Consumers(Consumers):
    """Warpgroups of consumers: 64 rows each of a tile, all of K."""

    @cute.jit
    def _tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane, cursor: Cursor,
    ):  # fmt: skip
        if cutlass.const_expr(kind.is_bf16):
            cursor = self._bf16_tile(ctx, kind, is_shared, tile, warp, lane, cursor)
        else:
            cursor = Consumers._tile(self, ctx, kind, is_shared, tile, warp, lane, cursor)
        return cursor

    @cute.jit
    def _bf16_tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane, cursor: Cursor,
    ):  # fmt: skip
        """Sum over K in order, and store; returns the next place in the ring."""
        plan, ring = self.plan, ctx.pipes.ring
        mma = bf16_mma(kind)
        sums = mma.make_fragment_C(mma.partition_shape_C((2 * PANEL_ROWS, kind.tokens)))
        sums.fill(0.0)
        columns = self.epilogue.load_columns(ctx, kind, is_shared, tile, lane)
        factors = self._factors(ctx, kind, tile)
        for step in cutlass.range(tile.steps(kind), unroll=1):
            ring.wait(cursor)
            # wgmma reads what was copied through the async proxy.
            cute.arch.fence_view_async_shared()
            tail = plan.k_blocks % kind.blocks
            if cutlass.const_expr(tail == 0):
                self._add_blocks(ctx, kind, sums, warp, lane, cursor, kind.blocks)
            elif step == kind.steps - 1:
                self._add_blocks(ctx, kind, sums, warp, lane, cursor, tail)
            else:
                self._add_blocks(ctx, kind, sums, warp, lane, cursor, kind.blocks)
            ring.release(cursor, lane)
            cursor = ring.next(cursor)
        found = cute.make_rmem_tensor(cute.size(sums), Float32)
        for i in cutlass.range_constexpr(cute.size(sums)):
            found[i] = sums[i] if factors is None else sums[i] * factors[i // 2 % 2]
        self.epilogue.store(ctx, kind, is_shared, found, columns, tile, warp, lane)
        return cursor

    @cute.jit
    def _add_blocks(
        self, ctx: ProductContext, kind: cutlass.Constexpr, sums: cute.Tensor, warp, lane,
        cursor: Cursor, count: cutlass.Constexpr,
    ):  # fmt: skip
        """Add the products of a stage's first k blocks: operands are made while the tensor core has
        those before."""
        for block in cutlass.range_constexpr(count):
            words = RowWords(ctx.smem, self.plan, cursor.stage, block, kind, warp, lane)
            b = self._columns(ctx, kind, cursor.stage, block)
            for part in cutlass.range_constexpr(PARTS):
                fragment = words.fragment(part)
                first = part * PART_STEPS
                warpgroup.fence()
                gemm(
                    lambda: bf16_mma(kind), sums, fragment, b, range(first, first + PART_STEPS),
                    first, True,
                )  # fmt: skip
                warpgroup.commit_group()
                warpgroup.wait_group(1)
        warpgroup.wait_group(0)

    def _columns(self, ctx: ProductContext, kind: Kind, stage, block: int):
        """The B operand of a k block."""
        mma = bf16_mma(kind)
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(ctx.smem.x_bf16_tiles[kind.tokens]))
        return b[None, None, None, stage * (self.plan.x_rows // kind.x_rows) + block]

    def _factors(self, ctx: ProductContext, kind: Kind, tile: WorkTile):
        """Of a lane's rows g and g + 8; None where there are none."""
        if kind.dtype != "nvfp4":
            return None
        matrices = (GATE, UP) if self.plan.is_gated else (DOWN, DOWN)
        scales = ctx.operands.global_scales
        return [scales[matrix, tile.expert] * Float32(LIFT) for matrix in matrices]
