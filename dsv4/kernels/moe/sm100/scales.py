"""Scale warp of a grouped product of Blackwell: scales of tokens, and of FP8 weights, where the
tensor core expects them.

The tensor core takes a scale for each 32 elements of K of a row. Those of a token are equal in a k
block of 128, so that every product of the block reads the same byte of a column's word; those of
FP4 weights are the four bytes of a row's word, which the load warp brings; those of FP8 weights are
equal in 128 rows, too. Of tokens in NVFP4 a word of four is that of 64 elements.
"""

import cutlass
from cutlass import Int32, Int64, cute

from dsv4.kernels.gemm.sm100.scales import LANE_WORDS, ONE, WARP, store_words
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.moe.sm100.context import ProductContext, WorkTile
from dsv4.kernels.moe.sm100.plan import ATOM_WORDS, LOADS_AHEAD, ProductPlan

EVERY_BYTE = 0x01010101


class ScaleWarp:
    """Producer of scales: reads those of some k blocks ahead."""

    def __init__(self, plan: ProductPlan, top_k: int):
        self.plan = plan
        self.top_k = top_k
        self.token_words = -(-plan.columns // WARP)  # of a lane
        self.token_values = self.token_words * plan.atoms
        self.values = self.token_values + plan.weights

    @cute.jit
    def fill(self, ctx: ProductContext):
        """Write the scales of every stage."""
        plan, ring, lane = self.plan, ctx.pipes.ring, cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        scheduler, counts = ctx.schedule(plan), ctx.operands.counts
        words, words_ahead = scheduler.words(Int32(0)), scheduler.words(Int32(1))
        num_groups, live = counts[0], counts[1]
        columns = [w * WARP + lane for w in range(self.token_words)]
        here = cute.make_rmem_tensor((self.values, LOADS_AHEAD), Int32)
        next_values = cute.make_rmem_tensor((self.values, LOADS_AHEAD), Int32)
        tile, count = scheduler.tile(Int32(0), words, live), scheduler.count(num_groups)
        pairs = ctx.places(tile, columns)
        ahead = scheduler.tile(Int32(1), words_ahead, live)
        rows = ctx.rows(plan, self.top_k, tile, columns, pairs)
        if count > 0:
            self._load(ctx, tile, rows, lane, Int32(0), next_values)
        cursor = ring.producer()
        for n in cutlass.range(count, unroll=1):
            # Asked for a tile early.
            later = scheduler.words(n + 2)
            pairs = ctx.places(ahead, columns)
            rows_ahead = ctx.rows(plan, self.top_k, ahead, columns, pairs)
            for first in cutlass.range(0, tile.steps, LOADS_AHEAD, unroll=1):
                here.store(next_values.load())
                if first + LOADS_AHEAD < plan.k_blocks:
                    self._load(ctx, tile, rows, lane, first + LOADS_AHEAD, next_values)
                elif n + 1 < count:
                    self._load(ctx, ahead, rows_ahead, lane, Int32(0), next_values)
                for i in cutlass.range_constexpr(LOADS_AHEAD):
                    if first + i < plan.k_blocks:
                        ring.acquire(cursor)
                        self._store(ctx, tile, cursor.stage, lane, here[None, i])
                        # The tensor core reads through another proxy.
                        cute.arch.fence_view_async_shared()
                        ring.at(cursor.stage).commit(lane)
                        cursor = ring.next(cursor)
            if tile.steps == 0 and n + 1 < count:
                self._load(ctx, ahead, rows_ahead, lane, Int32(0), next_values)
            tile, rows = ahead, rows_ahead
            ahead = scheduler.tile(n + 2, later, live)

    @cute.jit
    def _load(self, ctx: ProductContext, tile: WorkTile, rows, lane, first, values: cute.Tensor):
        """Ask for the scales of some k blocks: of a lane's columns, then of FP8 weights."""
        plan, operands = self.plan, ctx.operands
        for i in cutlass.range_constexpr(LOADS_AHEAD):
            block = first + i
            if block < plan.k_blocks:
                self._load_tokens(ctx, tile, rows, lane, block, values[None, i])
                for m in cutlass.range_constexpr(plan.weights):
                    scale = Int32(ONE)
                    if cutlass.const_expr(plan.is_promoted):
                        pass  # they are multiplied later
                    elif tile.is_shared:
                        scales = operands.shared_scales
                        if m == ctx.rank % plan.weights:
                            scale = Int32(scales[m][tile.row_tile, block]) & 0xFF
                    elif cutlass.const_expr(plan.expert_dtype == "fp8"):
                        scale = operands.scales[m][tile.expert, tile.row_tile, block]
                        scale = Int32(scale) & 0xFF
                    values[self.token_values + m, i] = scale

    @cute.jit
    def _load_tokens(
        self, ctx: ProductContext, tile: WorkTile, rows, lane, block, values: cute.Tensor
    ):
        """Ask for the scales of a lane's columns."""
        for w in cutlass.range_constexpr(self.token_words):
            scale = Int32(ONE)
            if w * WARP + lane < tile.count:
                # A byte of a recast tensor has no sign of its own.
                scale = Int32(ctx.operands.x_scale[rows[w], block]) & 0xFF
            values[w * self.plan.atoms] = scale

    @cute.jit
    def _store(self, ctx: ProductContext, tile: WorkTile, stage, lane, values: cute.Tensor):
        """Write the scales of a stage."""
        plan = self.plan
        self._store_tokens(ctx, tile, stage, lane, values)
        atoms = ctx.smem.weight_scales + stage * (plan.weights * plan.atom_words)
        if tile.is_shared:
            # Of the one weight that this CTA has.
            scale = values[self.token_values]
            for m in cutlass.range_constexpr(1, plan.weights):
                own = values[self.token_values + m]
                scale = cutlass.select_(ctx.rank == m, own, scale)
            store_words(atoms, lane, [scale * EVERY_BYTE] * LANE_WORDS)
        elif cutlass.const_expr(plan.expert_dtype == "fp8"):
            for m in cutlass.range_constexpr(plan.weights):
                scale = values[self.token_values + m] * EVERY_BYTE
                store_words(atoms + m * ATOM_WORDS, lane, [scale] * LANE_WORDS)

    @cute.jit
    def _store_tokens(self, ctx: ProductContext, tile: WorkTile, stage, lane, values: cute.Tensor):
        """Write the scales of tokens of a stage, and 1 where there is no column."""
        words = [
            values[w * self.plan.atoms] if w < self.token_words else Int32(ONE)
            for w in range(LANE_WORDS)
        ]
        store_words(ctx.smem.x_scales + stage * self.plan.atom_words, lane, words)


class PackedScaleWarp(ScaleWarp):
    """That of routed experts in NVFP4: of their tokens a word for each product."""

    @cute.jit
    def _load_tokens(
        self, ctx: ProductContext, tile: WorkTile, rows, lane, block, values: cute.Tensor
    ):
        """Ask for the scales of a lane's columns; zeros where there is no token."""
        atoms = self.plan.atoms
        if tile.is_shared:
            ScaleWarp._load_tokens(self, ctx, tile, rows, lane, block, values)
        else:
            scales = ctx.operands.packed.x.scales
            for w in cutlass.range_constexpr(self.token_words):
                words = cute.make_rmem_tensor(atoms, Int32)
                words.fill(0)
                if w * WARP + lane < tile.count:
                    offset = Int64(rows[w]) * scales.stride[0] + block * (4 * atoms)
                    source = pointer_at(scales.iterator, offset, Int32, align=4 * atoms)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(atoms)), words)
                for atom in cutlass.range_constexpr(atoms):
                    values[w * atoms + atom] = words[atom]

    @cute.jit
    def _store_tokens(self, ctx: ProductContext, tile: WorkTile, stage, lane, values: cute.Tensor):
        """Write the scales of tokens of a stage."""
        atoms, place = self.plan.atoms, ctx.smem.x_scales + stage * self.plan.atom_words
        if tile.is_shared:
            ScaleWarp._store_tokens(self, ctx, tile, stage, lane, values)
        else:
            for atom in cutlass.range_constexpr(atoms):
                words = [
                    values[w * atoms + atom] if w < self.token_words else Int32(0)
                    for w in range(LANE_WORDS)
                ]
                store_words(place + atom * ATOM_WORDS, lane, words)
