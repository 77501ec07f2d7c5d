"""Consumer warpgroups of a grouped product: FP4 decoded into registers, products, promotion."""

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.wgmma import gemm
from dsv4.kernels.moe.layout import PANEL_ROWS, STEPS, TABLE_EXPONENT
from dsv4.kernels.moe.plan import ProductPlan
from dsv4.kernels.moe.sm90.context import ProductContext, WorkTile, read_schedule, tile_mma
from dsv4.kernels.moe.sm90.fragments import load_fragment, packed_scale, raw_scale


class Consumers:
    """Both warpgroups: 64 rows each of a tile, 32 of every panel, all of K.

    Args:
        epilogue: what becomes of the sums.
    """

    def __init__(self, plan: ProductPlan, epilogue):
        self.plan = plan
        self.epilogue = epilogue

    @cute.jit
    def compute(self, ctx: ProductContext, warp):
        """Every tile of the CTA; a consumer warp has the unit of its number in both panels."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        scheduler = read_schedule(ctx, plan)
        cursor = ctx.pipes.ring.consumer()
        slot = ctx.cta
        tile = scheduler.find(slot)
        while scheduler.exists(slot):
            slot = scheduler.next(slot)
            ahead = scheduler.find(slot)
            if tile.is_shared:
                cursor = self._tile(ctx, plan.shared, True, tile, warp, lane, cursor)
            else:
                cursor = self._tile(ctx, plan.routed, False, tile, warp, lane, cursor)
            tile = ahead

    @cute.jit
    def _tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane, cursor: Cursor,
    ):  # fmt: skip
        """Sum k blocks in order, and store; returns the next place in the ring."""
        plan, ring = self.plan, ctx.pipes.ring
        mma = tile_mma(kind)
        acc = mma.make_fragment_C(mma.partition_shape_C((PANEL_ROWS, kind.tokens)))
        sums = cute.make_rmem_tensor(cute.size(acc), Float32)
        sums.fill(0.0)
        columns = self.epilogue.load_columns(ctx, kind, is_shared, tile, lane)
        for step in cutlass.range(kind.steps, unroll=1):
            ring.wait(cursor)
            for block in cutlass.range_constexpr(kind.blocks):
                is_last = block == kind.blocks - 1
                if cutlass.const_expr(is_last and plan.k_blocks % kind.blocks != 0):
                    if step * kind.blocks + block < plan.k_blocks:
                        self._block(ctx, kind, sums, acc, warp, lane, cursor, block)
                else:
                    self._block(ctx, kind, sums, acc, warp, lane, cursor, block)
            ring.release(cursor, lane)
            cursor = ring.next(cursor)
        self.epilogue.store(ctx, kind, is_shared, sums, columns, tile, warp, lane)
        return cursor

    @cute.jit
    def _block(
        self, ctx: ProductContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        warp, lane, cursor: Cursor, block: cutlass.Constexpr,
    ):  # fmt: skip
        """Add the products of a k block."""
        plan, smem, stage = self.plan, ctx.smem, cursor.stage
        fragment, words = load_fragment(smem, stage, block, kind, warp, lane)
        mma = tile_mma(kind)
        x = smem.shared_x if kind is plan.shared or kind == plan.shared else smem.routed_x
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(x))
        tile = stage * (plan.x_rows // kind.tokens) + block
        b_block = b[None, None, None, tile]
        first_scale = stage * plan.x_rows + block * kind.tokens
        if cutlass.const_expr(kind.dtype == "fp4" and not kind.is_packed):
            # Every step by itself.
            for step in cutlass.range_constexpr(STEPS):
                self._multiply(kind, acc, fragment, b_block, [step])
                scales = [raw_scale(word, step) for word in words]
                self._promote(ctx, kind, sums, acc, scales, first_scale, lane)
        else:
            self._multiply(kind, acc, fragment, b_block, range(STEPS))
            if cutlass.const_expr(kind.dtype == "fp4"):
                scales = [packed_scale(word) for word in words]
            else:
                scales = [(smem.block_scale + (stage * 2 + i)).load() for i in range(2)]
            self._promote(ctx, kind, sums, acc, scales, first_scale, lane)

    @cute.jit
    def _multiply(self, kind: cutlass.Constexpr, acc, fragment, b_block, steps: cutlass.Constexpr):
        warpgroup.fence()
        gemm(lambda: tile_mma(kind), acc, fragment, b_block, steps, 0, False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def _promote(
        self, ctx: ProductContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        weight_scales, first_scale, lane,
    ):  # fmt: skip
        """sums += acc * (activation scale of the column * weight scale of the row)."""
        # Packed codes are times 2^-5; the factor must not overflow before the activation's.
        lift = 2.0**-TABLE_EXPONENT if kind.dtype == "fp4" and kind.is_packed else 1.0
        for n in cutlass.range_constexpr(kind.column_groups):
            pair = cute.make_rmem_tensor(2, Float32)
            source = ctx.smem.x_scale + (first_scale + n * 8 + lane % 4 * 2)
            cute.autovec_copy(cute.make_tensor(source.align(8), cute.make_layout(2)), pair)
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    i = n * 4 + r * 2 + c
                    factor = pair[c] * lift * weight_scales[r]
                    sums[i] = sums[i] + acc[i] * factor
