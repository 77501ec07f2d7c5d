"""Consumer warpgroups of a grouped product: FP4 decoded into registers, products, promotion."""

import cutlass
from cutlass import Float32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.wgmma import gemm, scale_rows
from dsv4.kernels.moe.layout import LIFT, PANEL_ROWS, STEPS
from dsv4.kernels.moe.plan import Kind, ProductPlan
from dsv4.kernels.moe.sm90.context import ProductContext, WorkTile, read_schedule, tile_mma
from dsv4.kernels.moe.sm90.fragments import load_fragment, packed_scale, raw_scale, row_scale


class Consumers:
    """Warpgroups of consumers: 64 rows each of a tile, those of two panels, all of K.

    Args:
        epilogue: what becomes of the sums.
    """

    def __init__(self, plan: ProductPlan, epilogue):
        self.plan = plan
        self.epilogue = epilogue

    @cute.jit
    def compute(self, ctx: ProductContext, warp):
        """Every tile of the CTA; a warp has the unit of its number in both panels."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        scheduler = read_schedule(ctx, plan)
        cursor = ctx.pipes.ring.consumer()
        slot = ctx.slot
        tile = scheduler.find(slot)
        while scheduler.exists(slot):
            slot = scheduler.next(slot)
            ahead = scheduler.find(slot)
            cursor = self.compute_tile(ctx, tile, warp, lane, cursor)
            tile = ahead

    @cute.jit
    def compute_tile(self, ctx: ProductContext, tile: WorkTile, warp, lane, cursor: Cursor):
        """A tile by its kind; returns the next place in the ring."""
        plan, narrow, wide = self.plan, self.plan.routed[0], self.plan.routed[-1]
        if tile.is_shared:
            if cutlass.const_expr(plan.has_shared):
                cursor = self._tile(ctx, plan.shared, True, tile, warp, lane, cursor)
        elif cutlass.const_expr(plan.has_routed):
            if cutlass.const_expr(narrow == wide):
                cursor = self._tile(ctx, wide, False, tile, warp, lane, cursor)
            elif tile.count <= narrow.tokens:
                cursor = self._tile(ctx, narrow, False, tile, warp, lane, cursor)
            else:
                cursor = self._tile(ctx, wide, False, tile, warp, lane, cursor)
        return cursor

    @cute.jit
    def _tile(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, warp, lane, cursor: Cursor,
    ):  # fmt: skip
        """Sum k blocks in order, and store; returns the next place in the ring."""
        plan, ring = self.plan, ctx.pipes.ring
        mma = tile_mma(kind)
        accs = [
            mma.make_fragment_C(mma.partition_shape_C((2 * PANEL_ROWS, kind.tokens)))
            for _ in range(kind.in_flight)
        ]
        sums = cute.make_rmem_tensor(cute.size(accs[0]), Float32)
        sums.fill(0.0)
        row_words = cute.make_rmem_tensor((2, 2), Uint32)
        row_words.fill(0)
        columns = self.epilogue.load_columns(ctx, kind, is_shared, tile, lane)
        for step in cutlass.range(tile.steps(kind), unroll=1):
            ring.wait(cursor)
            if cutlass.const_expr(plan.has_copies):
                # wgmma reads what was copied through the async proxy.
                cute.arch.fence_view_async_shared()
            tail = plan.k_blocks % kind.blocks
            if cutlass.const_expr(tail == 0):
                self._blocks(ctx, kind, sums, accs, row_words, warp, lane, cursor, kind.blocks)
            elif step == kind.steps - 1:
                self._blocks(ctx, kind, sums, accs, row_words, warp, lane, cursor, tail)
            else:
                self._blocks(ctx, kind, sums, accs, row_words, warp, lane, cursor, kind.blocks)
            ring.release(cursor, lane)
            cursor = ring.next(cursor)
        if cutlass.const_expr(plan.scales_rows_last(kind)):
            # One after the other: a product of both might be more than fp32 holds.
            scale_rows(sums, [LIFT] * 2)
            scale_rows(
                sums, [row_scale(*(row_words[p, odd] for odd in range(2))) for p in range(2)]
            )
        self.epilogue.store(ctx, kind, is_shared, sums, columns, tile, warp, lane)
        return cursor

    @cute.jit
    def _blocks(
        self, ctx: ProductContext, kind: cutlass.Constexpr, sums: cute.Tensor,
        accs: cutlass.Constexpr, row_words: cute.Tensor, warp, lane, cursor: Cursor,
        count: cutlass.Constexpr,
    ):  # fmt: skip
        """Add the products of a stage's first k blocks: the next ones are decoded while the tensor
        core has those before.

        Args:
            row_words: scale words of FP4 [panel, parity of the k block], replaced by the last ones;
                a stage has an even number of k blocks.
        """
        if cutlass.const_expr(kind.is_summed_by_step):
            for block in cutlass.range_constexpr(count):
                self._block_by_step(ctx, kind, sums, accs[0], warp, lane, cursor, block)
        else:
            for first in cutlass.range_constexpr(0, count, kind.in_flight):
                blocks = range(first, min(first + kind.in_flight, count))
                words = []
                for block in cutlass.range_constexpr(blocks.start, blocks.stop):
                    fragment, of_block = load_fragment(
                        ctx.smem, self.plan, cursor.stage, block, kind, warp, lane
                    )
                    words.append(of_block)
                    if cutlass.const_expr(self.plan.scales_rows_last(kind)):
                        for panel in cutlass.range_constexpr(2):
                            row_words[panel, block % 2] = of_block[panel]
                    b = self._tokens(ctx, kind, cursor.stage, block)
                    warpgroup.fence()
                    gemm(
                        lambda: tile_mma(kind), accs[block - first], fragment, b, range(STEPS), 0,
                        False,
                    )  # fmt: skip
                    warpgroup.commit_group()
                for block in cutlass.range_constexpr(blocks.start, blocks.stop):
                    warpgroup.wait_group(blocks.stop - 1 - block)
                    scales = self._weight_scales(
                        ctx, kind, cursor.stage, block, words[block - first]
                    )
                    self._promote(
                        ctx, kind, sums, accs[block - first], scales, cursor.stage, block, lane
                    )

    @cute.jit
    def _block_by_step(
        self, ctx: ProductContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        warp, lane, cursor: Cursor, block: cutlass.Constexpr,
    ):  # fmt: skip
        """Add the products of a k block of raw FP4, each step of 32 by itself."""
        fragment, words = load_fragment(ctx.smem, self.plan, cursor.stage, block, kind, warp, lane)
        b = self._tokens(ctx, kind, cursor.stage, block)
        for step in cutlass.range_constexpr(STEPS):
            warpgroup.fence()
            gemm(lambda: tile_mma(kind), acc, fragment, b, [step], 0, False)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            scales = [raw_scale(word, step) for word in words]
            self._promote(ctx, kind, sums, acc, scales, cursor.stage, block, lane)

    def _tokens(self, ctx: ProductContext, kind: Kind, stage, block: int):
        """The B operand of a k block."""
        mma = tile_mma(kind)
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(ctx.smem.x_tiles[kind.tokens]))
        return b[None, None, None, stage * (self.plan.x_rows // kind.tokens) + block]

    def _weight_scales(self, ctx: ProductContext, kind: Kind, stage, block: int, words):
        """Of the rows g and g + 8 of a lane; None where they are left to the tile's sums."""
        if self.plan.scales_rows_last(kind):
            return None
        if kind.dtype == "fp4":
            return [packed_scale(word) for word in words]
        first = ctx.smem.block_scale + (stage * self.plan.block_scales + 2 * block)
        return [(first + panel).load() for panel in range(2)]

    @cute.jit
    def _promote(
        self, ctx: ProductContext, kind: cutlass.Constexpr, sums: cute.Tensor, acc: cute.Tensor,
        weight_scales, stage, block: cutlass.Constexpr, lane,
    ):  # fmt: skip
        """sums += acc * (activation scale of the column * weight scale of the row), or without the
        row's."""
        # Packed codes are times 2^-5; the factor must not overflow before the activation's.
        lift = LIFT if kind.is_folded else 1.0
        first_scale = stage * self.plan.x_rows + block * kind.tokens
        for n in cutlass.range_constexpr(kind.column_groups):
            pair = cute.make_rmem_tensor(2, Float32)
            source = ctx.smem.x_scale + cute.assume(first_scale + n * 8 + lane % 4 * 2, divby=2)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    i = n * 4 + r * 2 + c
                    factor = pair[c]
                    if cutlass.const_expr(weight_scales is not None):
                        factor = factor * lift * weight_scales[r]
                    sums[i] = sums[i] + acc[i] * factor
