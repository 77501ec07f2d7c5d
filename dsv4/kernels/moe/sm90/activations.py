"""Activation warps of a grouped product: tokens of a tile into the ring, beside the weights.

Codes are gathered from L2 by token, or made of bf16 rows on the way; beside folded FP4 weights
their words are interleaved (`layout`). Columns that no token uses are left as they are: a column of
a product reads no other.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.quantize import PAIRS, TEAM, VECTOR, quantize_vector
from dsv4.kernels.gemm.sm90.activations import scale_value
from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.gather import WORD_BYTES, copy_vector, copy_word
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.vectors import in_registers
from dsv4.kernels.moe.layout import (
    K_BLOCK,
    PANEL_ROWS,
    interleaved_place,
    interleaved_word,
)
from dsv4.kernels.moe.plan import ACTIVATION_WARPS, Kind, ProductPlan
from dsv4.kernels.moe.sm90.context import ProductContext, WorkTile, panels_of, read_schedule

WARP = 32
BATCH = 8  # loads of a lane under way
BLOCK_VECTORS = K_BLOCK // VECTOR_BYTES
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
assert K_BLOCK // WORD_BYTES == WARP, "a lane has a word of a k block"


class ActivationWarps:
    """Each fills every `ACTIVATION_WARPS`-th stage with codes and scales.

    Args:
        plan: of the product; it says what the rows are.
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
        slot = ctx.slot
        tile = scheduler.find(slot)
        rows = self.rows(ctx, tile, lane)
        while scheduler.exists(slot):
            slot = scheduler.next(slot)
            ahead = scheduler.find(slot)
            rows_ahead = self.rows(ctx, ahead, lane)
            cursor, turn = self.fill_tile(ctx, tile, rows, warp, lane, cursor, turn)
            tile, rows = ahead, rows_ahead

    @cute.jit
    def fill_tile(
        self, ctx: ProductContext, tile: WorkTile, rows, warp, lane, cursor: Cursor, turn
    ):
        """Fill the stages of a tile by its kind."""
        plan, narrow, wide = self.plan, self.plan.routed[0], self.plan.routed[-1]
        if tile.is_shared:
            if cutlass.const_expr(plan.has_shared):
                cursor, turn = self._fill_stages(
                    ctx, plan.shared, True, tile, rows, warp, lane, cursor, turn
                )
        elif cutlass.const_expr(plan.has_routed):
            if cutlass.const_expr(narrow == wide):
                cursor, turn = self._fill_stages(
                    ctx, wide, False, tile, rows, warp, lane, cursor, turn
                )
            elif tile.count <= narrow.tokens:
                cursor, turn = self._fill_stages(
                    ctx, narrow, False, tile, rows, warp, lane, cursor, turn
                )
            else:
                cursor, turn = self._fill_stages(
                    ctx, wide, False, tile, rows, warp, lane, cursor, turn
                )
        return cursor, turn

    @cute.jit
    def rows(self, ctx: ProductContext, tile: WorkTile, lane):
        """Rows of x for columns `lane`, `lane` + 32 and so on of a tile."""
        pairs = ctx.operands.pairs
        rows = ()
        for i in cutlass.range_constexpr(-(-max(kind.tokens for kind in self.plan.kinds) // WARP)):
            column = i * WARP + lane
            row = tile.first + column
            if cutlass.const_expr(self.plan.is_gated):
                is_pair = not tile.is_shared
                if ctx.operands.weights.shape[0] == 1:
                    # The only token's row: where it stands in the list is not worth a load.
                    row = column
                elif is_pair and column < tile.count:
                    row = pairs[row] // self.top_k
            elif tile.is_shared:
                row += pairs.shape[0]
            rows += (row,)
        return rows

    @cute.jit
    def _fill_stages(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, rows, warp, lane, cursor: Cursor, turn,
    ):  # fmt: skip
        ring = ctx.pipes.ring
        for step in cutlass.range(tile.steps(kind), unroll=1):
            if turn == warp:
                factor = None
                if cutlass.const_expr(kind.dtype == "fp8"):
                    factor = self._block_scale(ctx, kind, is_shared, tile, lane, step)
                if cutlass.const_expr(self.plan.quantizes):
                    self._quantize(ctx, kind, tile, rows, lane, step, cursor)
                else:
                    self._copy(ctx, kind, tile, rows, lane, step, cursor)
                if cutlass.const_expr(kind.dtype == "fp8"):  # noqa: SIM102 static, then dynamic
                    if lane < 2 * kind.blocks:
                        place = cursor.stage * self.plan.block_scales + lane
                        (ctx.smem.block_scale + place).store(scale_value(factor))
                # wgmma reads codes through the async proxy; of copies the consumers take care.
                if cutlass.const_expr(not self.plan.has_copies):
                    cute.arch.fence_view_async_shared()
                elif cutlass.const_expr(self.plan.quantizes):
                    # The other product's copies arrive, too: here there are none.
                    cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + cursor.stage)
                ring.at(cursor.stage).commit(lane)
            cursor = ring.next(cursor)
            turn = cutlass.select_(turn == ACTIVATION_WARPS - 1, Int32(0), turn + 1)
        return cursor, turn

    # ---- codes ----

    @cute.jit
    def _copy(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step,
        cursor: Cursor,
    ):  # fmt: skip
        """Codes and scales of a stage as they lie; the copies arrive at the stage's mbarrier."""
        scales = self._load_scales(ctx, kind, tile, rows, lane, step)
        ctx.pipes.ring.acquire(cursor)
        if cutlass.const_expr(kind.is_folded):
            self._copy_words(ctx, kind, tile, rows, lane, step, cursor.stage)
        else:
            self._copy_vectors(ctx, kind, tile, rows, lane, step, cursor.stage)
        for i in cutlass.range_constexpr(cute.size(scales)):
            index = i * WARP + lane
            if index < tile.count * kind.blocks:
                column, block = self._column(index, kind)
                self._scale_address(ctx, kind, cursor.stage, column, block).store(
                    scale_value(scales[i])
                )
        cute.arch.cp_async_mbarrier_arrive_noinc(ctx.pipes.ring.full + cursor.stage)

    @cute.jit
    def _copy_vectors(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step, stage
    ):
        """Codes of a stage in their order."""
        x = ctx.operands.x
        vectors = tile.count * (kind.blocks * BLOCK_VECTORS)
        for start in cutlass.range(0, vectors, WARP, unroll=4):
            index = start + lane
            column, block = self._column(index // BLOCK_VECTORS, kind)
            row = row_of(rows, column, kind)
            k_block = step * kind.blocks + block
            if index < vectors and k_block < self.plan.k_blocks:
                vector = index % BLOCK_VECTORS
                offset = Int64(row) * x.stride[0] + k_block * K_BLOCK + vector * VECTOR_BYTES
                target = self._code_address(ctx, kind, stage, column, block, vector)
                source = pointer_at(x.iterator, offset, Uint32)
                copy_vector(Int32(target.toint()), source.toint(), Int32(VECTOR_BYTES))

    @cute.jit
    def _copy_words(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step, stage
    ):
        """Codes of a stage, words interleaved: a lane has a place of each k block."""
        x, block_bytes = ctx.operands.x, kind.tokens * K_BLOCK
        size = Int32(WORD_BYTES)
        own = step * (kind.blocks * K_BLOCK) + interleaved_word(lane) * WORD_BYTES
        vector, inner = lane // VECTOR_WORDS, lane % VECTOR_WORDS * WORD_BYTES
        for column in cutlass.range(tile.count, unroll=2):
            row = row_of(rows, column, kind)
            source = pointer_at(x.iterator, Int64(row) * x.stride[0] + own, Uint32).toint()
            target = self._code_address(ctx, kind, stage, column, Int32(0), vector) + inner
            for block in cutlass.range_constexpr(kind.blocks):
                if step * kind.blocks + block < self.plan.k_blocks:
                    offsets = block * block_bytes, block * K_BLOCK
                    copy_word(Int32(target.toint()), source, size, *offsets)

    @cute.jit
    def _load_scales(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step
    ):
        """Scales of a stage's codes as they are stored, one a lane, and again: a conversion would
        wait for them before the codes are asked for."""
        x_scale = ctx.operands.x_scale
        scales = cute.make_rmem_tensor(-(-kind.blocks * kind.tokens // WARP), x_scale.element_type)
        scales.fill(x_scale.element_type(0))
        for i in cutlass.range_constexpr(cute.size(scales)):
            index = i * WARP + lane
            column, block = self._column(index, kind)
            row = row_of(rows, column, kind)
            k_block = step * kind.blocks + block
            if index < tile.count * kind.blocks and k_block < self.plan.k_blocks:
                scales[i] = x_scale[row, k_block]
        return scales

    # ---- bf16 rows ----

    @cute.jit
    def _quantize(
        self, ctx: ProductContext, kind: cutlass.Constexpr, tile: WorkTile, rows, lane, step,
        cursor: Cursor,
    ):  # fmt: skip
        """Codes and scales of a stage of bf16 rows, 16 lanes a group of 128."""
        batch = WARP // TEAM * BATCH
        groups = tile.count * kind.blocks
        codes, scales = self._load_quantized(ctx, kind, rows, lane, step, Int32(0), groups)
        ctx.pipes.ring.acquire(cursor)
        self._store_quantized(ctx, kind, lane, cursor.stage, Int32(0), groups, codes, scales)
        for start in cutlass.range(batch, groups, batch, unroll=1):
            codes, scales = self._load_quantized(ctx, kind, rows, lane, step, start, groups)
            self._store_quantized(ctx, kind, lane, cursor.stage, start, groups, codes, scales)

    @cute.jit
    def _load_quantized(
        self, ctx: ProductContext, kind: cutlass.Constexpr, rows, lane, step, start, groups
    ):
        """Codes of a lane's eight elements, and scales of their groups, from group `start` on."""
        x = ctx.operands.x
        team, member, teams = lane // TEAM, lane % TEAM, WARP // TEAM
        words = cute.make_rmem_tensor((PAIRS, BATCH), Uint32)
        words.fill(0)
        for i in cutlass.range_constexpr(BATCH):
            index = start + i * teams + team
            column, block = self._column(index, kind)
            row = row_of(rows, column, kind)
            k_block = step * kind.blocks + block
            if index < groups and k_block < self.plan.k_blocks:
                offset = Int64(row) * x.stride[0] + k_block * K_BLOCK
                source = pointer_at(x.iterator, offset + member * VECTOR, Uint32)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PAIRS)), words[None, i])
        codes = cute.make_rmem_tensor((2, BATCH), Uint32)
        scales = cute.make_rmem_tensor(BATCH, Int32)
        codes.fill(0)
        scales.fill(0)
        for i in cutlass.range_constexpr(BATCH):
            # The same for all lanes of a warp, which shuffle.
            if start + i * teams < groups:
                vector, scale = quantize_vector(words[None, i])
                codes[0, i], codes[1, i], scales[i] = vector[0], vector[1], scale
        return codes, scales

    @cute.jit
    def _store_quantized(
        self, ctx: ProductContext, kind: cutlass.Constexpr, lane, stage, start, groups,
        codes: cute.Tensor, scales: cute.Tensor,
    ):  # fmt: skip
        team, member, teams = lane // TEAM, lane % TEAM, WARP // TEAM
        for i in cutlass.range_constexpr(BATCH):
            index = start + i * teams + team
            if index < groups:
                column, block = self._column(index, kind)
                self._store_codes(ctx, kind, stage, column, block, member, codes[None, i])
                if member == 0:
                    address = self._scale_address(ctx, kind, stage, column, block)
                    address.store(quant.unpack_e8m0(scales[i]))

    def _store_codes(
        self, ctx: ProductContext, kind: Kind, stage, column, block, member, codes: cute.Tensor
    ) -> None:
        """Store the two words of a member of a team."""
        size = WORD_BYTES if kind.is_folded else 2 * WORD_BYTES
        words = [[codes[0]], [codes[1]]] if kind.is_folded else [[codes[0], codes[1]]]
        for i, values in enumerate(words):
            place = interleaved_place(2 * member + i) if kind.is_folded else 2 * member
            vector, inner = place // VECTOR_WORDS, place % VECTOR_WORDS * WORD_BYTES
            target = self._code_address(ctx, kind, stage, column, block, vector)
            store_words(target + cute.assume(inner, divby=size), values)

    # ---- both ----

    @cute.jit
    def _block_scale(
        self, ctx: ProductContext, kind: cutlass.Constexpr, is_shared: cutlass.Constexpr,
        tile: WorkTile, lane, step,
    ):  # fmt: skip
        """FP8 weight scale of a stage, as it is stored, for the k block and the panels of a lane:
        lane 2 block, and one more for the rows g + 8."""
        operands, plan = ctx.operands, self.plan
        first, second = (row // (K_BLOCK // PANEL_ROWS) for row in panels_of(plan, tile.row_tile))
        block = step * kind.blocks + lane // 2
        value = operands.a_scale.element_type(0)
        if cutlass.const_expr(is_shared):
            value = operands.shared_a_scale.element_type(0)
        if lane < 2 * kind.blocks and block < plan.k_blocks:
            if cutlass.const_expr(is_shared):
                if lane % 2 == 0:
                    value = operands.shared_a_scale[first, block]
                else:
                    value = operands.shared_b_scale[second, block]
            else:
                if lane % 2 == 0:
                    value = operands.a_scale[tile.expert, first, block]
                else:
                    value = operands.b_scale[tile.expert, second, block]
        return value

    def _column(self, index, kind: Kind):
        """Column and k block of a stage of a group of 128."""
        if kind.blocks == 1:
            return index, Int32(0)
        return index // kind.blocks, index % kind.blocks

    def _code_address(self, ctx: ProductContext, kind: Kind, stage, column, block, vector):
        """Where the swizzle has 16 codes."""
        row = stage * self.plan.x_rows + block * kind.tokens + column
        offset = row * K_BLOCK + (vector ^ (column % 8)) * VECTOR_BYTES
        return ctx.smem.x + cute.assume(offset, divby=VECTOR_BYTES)

    def _scale_address(self, ctx: ProductContext, kind: Kind, stage, column, block):
        return ctx.smem.x_scale + (stage * self.plan.x_rows + block * kind.tokens + column)


def store_words(target: cute.Pointer, values: list) -> None:
    """Store words side by side in shared memory by one instruction."""
    pointer = cute.recast_ptr(target, dtype=Uint32)
    into = cute.make_tensor(pointer, cute.make_layout(len(values)))
    cute.autovec_copy(in_registers(values), into)


@cute.jit
def row_of(rows: tuple, column, kind: cutlass.Constexpr):
    """Row of x of a column, of those that a warp's lanes hold."""
    row = cute.arch.shuffle_sync(rows[0], column % WARP)
    for i in cutlass.range_constexpr(1, -(-kind.tokens // WARP)):
        other = cute.arch.shuffle_sync(rows[i], column % WARP)
        row = cutlass.select_(column >= i * WARP, other, row)
    return row
