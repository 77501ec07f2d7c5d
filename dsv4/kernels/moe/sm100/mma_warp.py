"""MMA warp of a grouped product of Blackwell: scales to TMEM, products, commits."""

import cutlass
from cutlass import Boolean, Int32, cute

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tcgen05 import (
    E2M1,
    E4M3,
    commit,
    copy_scales,
    fence_after_thread_sync,
    multiply_scaled,
    operand_descriptor,
    packed_product,
    scaled_product,
)
from dsv4.kernels.moe.layout import ATOM_BYTES, K_BLOCK, TILE_ROWS
from dsv4.kernels.moe.sm100.context import ProductContext, WorkTile
from dsv4.kernels.moe.sm100.plan import PACKED_BYTES, SCALE_COLUMNS, ProductPlan

DEPTH = 32  # bytes of K of a product: as many elements, of packed ones twice as many


class MmaWarp:
    """Consumer of the ring, producer of the sums: one lane issues all of it, which keeps copies of
    scales and products in order."""

    def __init__(self, plan: ProductPlan):
        self.plan = plan

    @cute.jit
    def multiply(self, ctx: ProductContext):
        """The products of every tile."""
        plan, sums = self.plan, ctx.pipes.sums
        address = ctx.tmem.start(plan.tmem_users)
        # A tile is read where the launch before has made the lists.
        pdl.wait_for_previous_launch()
        scheduler, counts = ctx.schedule(plan), ctx.operands.counts
        words, num_groups, live = scheduler.words(Int32(0)), counts[0], counts[1]
        cursor, target = ctx.pipes.ring.consumer(), sums.producer()
        tile = scheduler.tile(Int32(0), words, live)
        for n in cutlass.range(scheduler.count(num_groups), unroll=1):
            ahead = scheduler.words(n + 1)
            for _ in cutlass.range(self._sums_of(tile), unroll=1):
                sums.acquire(target)
                fence_after_thread_sync()
                start = address + target.stage * plan.sum_columns
                if tile.is_shared:
                    cursor = self._sum(ctx, tile, address, start, "fp8", 1, cursor)
                else:
                    cursor = self._sum(
                        ctx, tile, address, start, plan.expert_dtype, plan.weights, cursor
                    )
                with cute.arch.elect_one():
                    commit(sums.full + target.stage)
                target = sums.next(target)
            tile = scheduler.tile(n + 1, ahead, live)

    def _sums_of(self, tile: WorkTile) -> Int32:
        """Stages of sums of a tile."""
        if self.plan.is_promoted:
            return tile.steps
        return cutlass.select_(tile.steps > 0, Int32(1), Int32(0))

    @cute.jit
    def _sum(
        self, ctx: ProductContext, tile: WorkTile, address: cute.Pointer, start: cute.Pointer,
        dtype: cutlass.Constexpr, weights: cutlass.Constexpr, cursor: Cursor,
    ):  # fmt: skip
        """Sum the k blocks of a tile, or one where sums are promoted, of each weight in columns of
        its own, in the order of k, from zero; returns the next stage of the ring."""
        plan, smem, ring = self.plan, ctx.smem, ctx.pipes.ring
        weight_scales = address + plan.tmem.column("weight_scales")
        x_scales = address + plan.tmem.column("x_scales")
        steps = self._steps(tile, dtype)
        span, kind = SPAN_BYTES, "mxf8f6f4"
        if cutlass.const_expr(dtype == "nvfp4"):
            span, kind = PACKED_BYTES, "mxf4nvf4"
        for block in cutlass.range(1 if plan.is_promoted else plan.k_blocks, unroll=1):
            ring.wait(cursor)
            stage = cursor.stage
            with cute.arch.elect_one():
                # A copy waits for the products before it, which still read what it writes.
                scales = smem.x_scales.toint() + stage * (plan.atoms * ATOM_BYTES)
                self._copy(x_scales, scales, dtype)
                x = smem.x.toint() + stage * plan.x_bytes
                for i in cutlass.range_constexpr(weights):
                    place = stage * plan.weights + i
                    scales = smem.weight_scales.toint() + place * (plan.atoms * ATOM_BYTES)
                    own_scales = weight_scales + i * (plan.atoms * SCALE_COLUMNS)
                    self._copy(own_scales, scales, dtype)
                    slot = stage * plan.slots + i
                    weight = smem.weight.toint() + slot * plan.block_bytes
                    for k, (descriptor, columns) in enumerate(steps):
                        a = operand_descriptor(weight + k * DEPTH, span)
                        b = operand_descriptor(x + k * DEPTH, span)
                        adds = block > 0 if k == 0 else Boolean(True)
                        multiply_scaled(
                            start + i * plan.columns, a, b, descriptor, own_scales + columns,
                            x_scales + columns, adds, kind,
                        )  # fmt: skip
                commit(ring.empty + stage)
            cursor = ring.next(cursor)
        return cursor

    def _steps(self, tile: WorkTile, dtype: str) -> list:
        """Of each product of a k block its descriptor, and the column of its scales."""
        if dtype == "nvfp4":
            descriptor = packed_product(TILE_ROWS, tile.columns)
            return [(descriptor, atom * SCALE_COLUMNS) for atom in range(self.plan.atoms)]
        a_format = E2M1 if dtype == "fp4" else E4M3
        # The four scales of an FP4 row's word by turns; those of FP8 are the same.
        return [
            (scaled_product(TILE_ROWS, tile.columns, a_format, k), 0)
            for k in range(K_BLOCK // DEPTH)
        ]

    def _copy(self, target: cute.Pointer, source, dtype: str) -> None:
        """Copy the scales of 128 rows."""
        for atom in range(self.plan.atoms if dtype == "nvfp4" else 1):
            descriptor = operand_descriptor(source + atom * ATOM_BYTES)
            copy_scales(target + atom * SCALE_COLUMNS, descriptor)
