"""MMA warp of Blackwell's linears: scales to TMEM, products, commits."""

import cutlass
from cutlass import Int32, Int64, cute

from dsv4.kernels.gemm.config import STEP_BYTES
from dsv4.kernels.gemm.quantize import code_row
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import ATOM_ROWS, ATOM_WORDS, ROWS, LinearPlan
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tcgen05 import (
    commit,
    copy_scales,
    fence_after_thread_sync,
    multiply,
    multiply_scaled,
    operand_descriptor,
    scaled_product,
)

PRODUCT_BYTES = 32  # of a row in a product: 32 elements of K in FP8, 16 in bf16
PRODUCTS = STEP_BYTES // PRODUCT_BYTES  # of a k block


class MmaWarp:
    """Consumer of the ring, producer of the sums: one lane issues all of it, which keeps copies of
    scales and products in order."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        # Scales of a term are in a byte of their own.
        self.products = [
            scaled_product(ROWS, plan.tokens, b_scale_byte=term)
            for term in range(plan.tiling.terms)
        ]

    @cute.jit
    def multiply(self, ctx: LinearContext):
        """The products of every tile."""
        plan, sums = self.plan, ctx.pipes.sums
        address = ctx.tmem.start(plan.tmem_users)
        cursor, target = ctx.pipes.ring.consumer(), sums.producer()
        for _ in cutlass.range(ctx.scheduler.count, unroll=1):
            if cutlass.const_expr(plan.is_promoted):
                for _block in cutlass.range(plan.cta_blocks, unroll=1):
                    self._begin(ctx, target)
                    cursor = self._sum(ctx, address, target.stage, 1, cursor)
                    target = self._end(ctx, target)
            else:
                self._begin(ctx, target)
                for s in cutlass.range(plan.own_slices, unroll=1):
                    place = target.stage * plan.own_slices + s
                    cursor = self._sum(ctx, address, place, plan.slice_blocks, cursor)
                target = self._end(ctx, target)

    @cute.jit
    def _begin(self, ctx: LinearContext, target: Cursor):
        """Wait until the sums before in the same columns have been read."""
        ctx.pipes.sums.acquire(target)
        fence_after_thread_sync()

    @cute.jit
    def _end(self, ctx: LinearContext, target: Cursor) -> Cursor:
        """Sums of a stage are there once the products so far are over; returns the next one."""
        with cute.arch.elect_one():
            commit(ctx.pipes.sums.full + target.stage)
        return ctx.pipes.sums.next(target)

    @cute.jit
    def _sum(
        self,
        ctx: LinearContext,
        address: cute.Pointer,
        place,
        blocks: cutlass.Constexpr,
        cursor: Cursor,
    ):
        """Sum so many k blocks in the columns of a place, in the order of k, from zero; returns the
        next stage of the ring."""
        plan, ring = self.plan, ctx.pipes.ring
        columns = address + place * plan.columns
        for block in cutlass.range(blocks, unroll=1):
            ring.wait(cursor)
            with cute.arch.elect_one():
                if cutlass.const_expr(plan.is_quantized):
                    self._multiply_scaled(ctx, address, columns, cursor.stage, block > 0)
                else:
                    self._multiply_plain(ctx, columns, cursor.stage, block > 0)
                commit(ring.empty + cursor.stage)
            cursor = ring.next(cursor)
        return cursor

    @cute.jit
    def _multiply_scaled(self, ctx: LinearContext, address: cute.Pointer, columns, stage, adds):
        """The products of a k block with scales; one lane calls this."""
        plan, smem = self.plan, ctx.smem
        weight_scales = address + plan.tmem.column("weight_scales")
        x_scales = address + plan.tmem.column("x_scales")
        # A copy waits for the products before it, which still read what it writes.
        scales = smem.weight_scales.toint() + stage * (4 * ATOM_WORDS)
        copy_scales(weight_scales, operand_descriptor(scales))
        for atom in cutlass.range_constexpr(plan.token_atoms):
            place_of = stage * plan.token_atoms + atom
            scales = smem.x_scales.toint() + place_of * (4 * ATOM_WORDS)
            copy_scales(x_scales + atom * (ATOM_ROWS // 32), operand_descriptor(scales))
        weight = smem.weight.toint() + stage * plan.weight_bytes
        x = smem.x.toint() + stage * plan.x_bytes
        for term in cutlass.range_constexpr(plan.tiling.terms):
            for k in cutlass.range_constexpr(PRODUCTS):
                a = operand_descriptor(weight + k * PRODUCT_BYTES, SPAN_BYTES)
                b = self._x_descriptor(x, term, k)
                adds_to = adds if term + k == 0 else True
                product = self.products[term]
                multiply_scaled(columns, a, b, product, weight_scales, x_scales, adds_to)

    @cute.jit
    def _multiply_plain(self, ctx: LinearContext, columns, stage, adds):
        """The products of a k block of bf16; one lane calls this."""
        plan, smem = self.plan, ctx.smem
        weight = smem.weight.toint() + stage * plan.weight_bytes
        x = smem.x.toint() + stage * plan.x_bytes
        for k in cutlass.range_constexpr(PRODUCTS):
            a = operand_descriptor(weight + k * PRODUCT_BYTES, SPAN_BYTES)
            b = operand_descriptor(x + k * PRODUCT_BYTES, SPAN_BYTES)
            adds_to = adds if k == 0 else True
            multiply(columns, a, b, (ROWS, plan.columns), adds_to, "bf16")

    def _x_descriptor(self, x: Int32, term: int, k: int) -> Int64:
        """Of 32 elements of a term's codes in a stage: groups of eight rows by turns."""
        terms = self.plan.tiling.terms
        first = x + code_row(0, term, terms) * STEP_BYTES + k * PRODUCT_BYTES
        return operand_descriptor(first, SPAN_BYTES, group_step=terms)
