"""Scales of a ring's stage, where the tensor core expects them, and codes of bf16 activations.

The tensor core takes a scale for each 32 elements of K of a row. Those of a k block of 128 are
equal, so that every product of the block reads the same byte of a row's word: products of second
terms, whose scale is a sixteenth, that of the byte after it.
"""

import cutlass
from cutlass import Int32, Uint32, cute

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.operands import OutputTile, chosen_matrix, first_x_block
from dsv4.kernels.gemm.quantize import PAIRS, TEAM, code_row, load_vectors, term_vectors
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.load_warp import place
from dsv4.kernels.gemm.sm100.plan import ATOM_WORDS, LOADS_AHEAD, LinearPlan
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

WARP = 32
LANE_WORDS = 4
ONE = 127  # as E8M0
TERM_BITS = 4  # of the scale between both terms


@cute.jit
def weight_scale(plan: cutlass.Constexpr, ctx: LinearContext, tile: OutputTile, k_block):
    """E8M0 byte of a k block of a row tile; 1 where the scale is multiplied later."""
    if cutlass.const_expr(plan.is_promoted):
        return Int32(ONE)
    scales = ctx.operands.scales
    scale = chosen_matrix(scales, tile.weight, scales[0].element_type)
    # A byte of a recast tensor has no sign of its own.
    return Int32(scale[tile.row_tile, k_block]) & 0xFF


def scale_word(plan: LinearPlan, byte: Int32) -> Int32:
    """Scales of a token's terms, one byte each."""
    if plan.tiling.terms == 1:
        return byte
    return byte | (byte - TERM_BITS) << 8


@cute.jit
def store_words(atom: cute.Pointer, lane, words):
    """Write a lane's scales of 128 rows."""
    values = cute.make_rmem_tensor(LANE_WORDS, Int32)
    for i in cutlass.range_constexpr(LANE_WORDS):
        values[i] = words[i]
    target = atom + cute.assume(lane * LANE_WORDS, divby=LANE_WORDS)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(LANE_WORDS)))


class ScaleWarp:
    """Producer of the scales beside codes: reads those of some k blocks ahead."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        self.values = 1 + plan.token_words  # of a lane and a k block

    @cute.jit
    def fill(self, ctx: LinearContext):
        """Write the scales of every stage."""
        plan, ring, lane = self.plan, ctx.pipes.ring, cute.arch.lane_idx()
        pdl.wait_for_previous_launch()
        count = ctx.scheduler.count * plan.cta_blocks
        here = cute.make_rmem_tensor((self.values, LOADS_AHEAD), Int32)
        ahead = cute.make_rmem_tensor((self.values, LOADS_AHEAD), Int32)
        self._load(ctx, Int32(0), count, ahead)
        cursor = ring.producer()
        for first in cutlass.range(0, count, LOADS_AHEAD, unroll=1):
            here.store(ahead.load())
            self._load(ctx, first + LOADS_AHEAD, count, ahead)
            for i in cutlass.range_constexpr(LOADS_AHEAD):
                if first + i < count:
                    ring.acquire(cursor)
                    self._store(ctx, cursor.stage, lane, here[None, i])
                    # The tensor core reads through another proxy.
                    cute.arch.fence_view_async_shared()
                    ring.at(cursor.stage).commit(lane)
                    cursor = ring.next(cursor)

    @cute.jit
    def _load(self, ctx: LinearContext, first, count, values: cute.Tensor):
        """Ask for the scales of some steps: the weight's, then those of token 32 i + lane."""
        plan, x_scale = self.plan, ctx.operands.x_scale
        for i in cutlass.range_constexpr(LOADS_AHEAD):
            if first + i < count:
                tile, k_block = place(plan, ctx, first + i)
                values[0, i] = weight_scale(plan, ctx, tile, k_block)
                k_block += first_x_block(plan, tile)
                for w in cutlass.range_constexpr(plan.token_words):
                    token = tile.token_tile * plan.tokens + w * WARP + cute.arch.lane_idx()
                    scale = Int32(ONE)
                    if token < x_scale.shape[0]:
                        scale = Int32(x_scale[token, k_block]) & 0xFF
                    values[1 + w, i] = scale_word(plan, scale)

    @cute.jit
    def _store(self, ctx: LinearContext, stage, lane, values: cute.Tensor):
        """Write the scales of a stage."""
        atoms = self.plan.token_atoms
        store_words(ctx.smem.weight_scales + stage * ATOM_WORDS, lane, [values[0]] * LANE_WORDS)
        for atom in cutlass.range_constexpr(atoms):
            words = [
                values[1 + w] if w < self.plan.token_words else Int32(ONE)
                for w in range(LANE_WORDS * atom, LANE_WORDS * (atom + 1))
            ]
            store_words(ctx.smem.x_scales + (stage * atoms + atom) * ATOM_WORDS, lane, words)


class ActivationWarps:
    """Producers of codes and scales of bf16 activations: 16 lanes a token, and as many teams of
    them as a tile has tokens."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        assert plan.warps["activations"].threads == TEAM * plan.tokens

    @cute.jit
    def fill(self, ctx: LinearContext):
        """Write the codes and scales of every stage."""
        plan, ring, lane = self.plan, ctx.pipes.ring, cute.arch.lane_idx()
        thread = cute.arch.thread_idx()[0] - plan.warps["activations"].first_thread
        pdl.wait_for_previous_launch()
        count = ctx.scheduler.count * plan.cta_blocks
        here = cute.make_rmem_tensor((PAIRS, LOADS_AHEAD), Uint32)
        ahead = cute.make_rmem_tensor((PAIRS, LOADS_AHEAD), Uint32)
        scale_here = cute.make_rmem_tensor(LOADS_AHEAD, Int32)
        scale_ahead = cute.make_rmem_tensor(LOADS_AHEAD, Int32)
        self._load(ctx, thread, Int32(0), count, ahead, scale_ahead)
        cursor = ring.producer()
        for first in cutlass.range(0, count, LOADS_AHEAD, unroll=1):
            here.store(ahead.load())
            scale_here.store(scale_ahead.load())
            self._load(ctx, thread, first + LOADS_AHEAD, count, ahead, scale_ahead)
            for i in cutlass.range_constexpr(LOADS_AHEAD):
                if first + i < count:
                    ring.acquire(cursor)
                    self._store(ctx, cursor.stage, thread, here[None, i], scale_here[i])
                    # The tensor core reads through another proxy.
                    cute.arch.fence_view_async_shared()
                    ring.at(cursor.stage).commit(lane)
                    cursor = ring.next(cursor)

    @cute.jit
    def _load(self, ctx: LinearContext, thread, first, count, words, scales):
        """Ask for a lane's values of some steps, zeros of tokens that do not exist, and for the
        weight's scales."""
        plan, x = self.plan, ctx.operands.x
        words.fill(0)
        for i in cutlass.range_constexpr(LOADS_AHEAD):
            if first + i < count:
                tile, k_block = place(plan, ctx, first + i)
                scales[i] = weight_scale(plan, ctx, tile, k_block)
                k_block += first_x_block(plan, tile)
                token = tile.token_tile * plan.tokens + thread // TEAM
                if token < x.shape[0]:
                    load_vectors(x, token, k_block, thread % TEAM, words[None, i])

    @cute.jit
    def _store(self, ctx: LinearContext, stage, thread, words: cute.Tensor, weight_byte):
        """Write a lane's codes where the swizzle has them, and the scales."""
        plan, smem, terms = self.plan, ctx.smem, self.plan.tiling.terms
        token, lane = thread // TEAM, thread % TEAM
        codes, scale = term_vectors(words, terms)
        vector = (lane // 2) ^ (token % 8)
        for term in cutlass.range_constexpr(terms):
            offset = stage * plan.x_bytes + code_row(token, term, terms) * K_BLOCK
            offset += vector * VECTOR_BYTES + lane % 2 * (VECTOR_BYTES // 2)
            target = cute.recast_ptr(smem.x + cute.assume(offset, divby=8), dtype=Uint32)
            cute.autovec_copy(codes[term], cute.make_tensor(target, cute.make_layout(2)))
        if lane < WARP // plan.tokens:
            # Rows that are no token's, too: the copy reads all.
            atom = smem.x_scales + stage * ATOM_WORDS
            word = scale_word(plan, scale)
            store_words(atom, lane * plan.tokens + token, [word] * LANE_WORDS)
        if thread < WARP:
            atom = smem.weight_scales + stage * ATOM_WORDS
            store_words(atom, thread, [weight_byte] * LANE_WORDS)
