"""Activations of a token tile: quantised into shared memory, or the scales of streamed ones."""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.plan import CONSUMER_WARPS, LinearPlan
from dsv4.kernels.gemm.quantize import PAIRS, TEAM, code_row, load_vectors, term_vectors
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

CONSUMERS = 32 * CONSUMER_WARPS
ALL_CONSUMERS = 1  # named barrier
# Loads of a thread under way: where DRAM is busy with weights each takes more than a microsecond.
MOST_LOADS = 8


def sync_consumers() -> None:
    """Named barrier of both warpgroups."""
    cute.arch.barrier(barrier_id=ALL_CONSUMERS, number_of_threads=CONSUMERS)


@cute.jit
def clear_vectors(start: cute.Pointer, first: Int32 | int, end: Int32 | int) -> None:
    """Zero the vectors of 16 bytes from `first` to `end` behind an address, by all consumers."""
    zeros = cute.make_rmem_tensor(4, Uint32)
    zeros.fill(0)
    base = cute.recast_ptr(start, dtype=Uint32)
    for i in cutlass.range(first + cute.arch.thread_idx()[0], end, CONSUMERS, unroll=1):
        target = base + cute.assume(i * 4, divby=4)
        cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))


def scale_value(stored):
    """A scale in fp32, of an E8M0 byte or of fp32."""
    if stored.dtype is Float32:
        return stored
    # A byte of a recast tensor has no sign of its own.
    return quant.unpack_e8m0(Int32(stored) & 0xFF)


class Activations:
    """Preparation of a token tile by the consumers, before its first product."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def clear(self, ctx: LinearContext):
        """Zero resident activations and their scales: tokens past the last one stay unwritten."""
        plan, smem = self.plan, ctx.smem
        thread = cute.arch.thread_idx()[0]
        vectors = plan.cta_blocks * plan.columns * K_BLOCK // VECTOR_BYTES
        clear_vectors(smem.x_start, 0, vectors)
        for i in cutlass.range(thread, plan.tokens * plan.cta_blocks, CONSUMERS, unroll=1):
            smem.scales[i % plan.tokens, i // plan.tokens] = Float32(0.0)
        sync_consumers()

    @cute.jit
    def take(self, ctx: LinearContext, token_tile, x_block, is_first):
        """Scales of a token tile from a k block of x on, and codes where they are resident.

        Args:
            is_first: whether it is the first one; then zeros are there, of all consumers.
        """
        plan, smem = self.plan, ctx.smem
        thread = cute.arch.thread_idx()[0]
        first_token = token_tile * plan.tokens
        first_block = x_block + ctx.rank * plan.cta_blocks
        if not is_first:
            # All are done with the tile before.
            sync_consumers()
        if cutlass.const_expr(plan.tiling.is_streamed):
            x_scale = ctx.operands.x_scale
            for i in cutlass.range(thread, plan.tokens * plan.cta_blocks, CONSUMERS, unroll=1):
                token, block = i // plan.cta_blocks, i % plan.cta_blocks
                value = Float32(0.0)
                if first_token + token < x_scale.shape[0]:
                    value = scale_value(x_scale[first_token + token, first_block + block])
                smem.scales[token, block] = value
        else:
            self._quantize(ctx, first_token, first_block, thread)
            # wgmma reads codes through the async proxy, those that `clear` wrote, too.
            cute.arch.fence_view_async_shared()
        sync_consumers()

    @cute.jit
    def _quantize(self, ctx: LinearContext, first_token, first_block, thread):
        """Codes and scales of the CTA's k blocks of bf16 activations."""
        plan, x = self.plan, ctx.operands.x
        team, lane, teams = thread // TEAM, thread % TEAM, CONSUMERS // TEAM
        batch = min(plan.tokens * plan.cta_blocks // teams, MOST_LOADS)
        # An even number: both teams of a warp, whose lanes shuffle, take the same turns.
        groups = cutlass.min(x.shape[0] - first_token, plan.tokens) * plan.cta_blocks
        for start in cutlass.range(team, groups, teams * batch, unroll=1):
            words = cute.make_rmem_tensor((PAIRS, batch), Uint32)
            for i in cutlass.range_constexpr(batch):
                group = start + i * teams
                if group < groups:
                    token, block = group // plan.cta_blocks, group % plan.cta_blocks
                    load_vectors(x, first_token + token, first_block + block, lane, words[None, i])
            for i in cutlass.range_constexpr(batch):
                group = start + i * teams
                if group < groups:
                    token, block = group // plan.cta_blocks, group % plan.cta_blocks
                    codes, scale = term_vectors(words[None, i], plan.tiling.terms)
                    self._store(ctx, token, block, lane, codes, scale)

    @cute.jit
    def _store(self, ctx: LinearContext, token, block, lane, codes, scale):
        """Write a lane's codes where the swizzle has them, and the scale of their group."""
        smem, terms = ctx.smem, self.plan.tiling.terms
        vector = (lane // 2) ^ (token % 8)
        for term in cutlass.range_constexpr(terms):
            offset = (block * self.plan.columns + code_row(token, term, terms)) * K_BLOCK
            offset += vector * VECTOR_BYTES + lane % 2 * (VECTOR_BYTES // 2)
            target = cute.recast_ptr(smem.x_start + cute.assume(offset, divby=8), dtype=Uint32)
            cute.autovec_copy(codes[term], cute.make_tensor(target, cute.make_layout(2)))
        if lane == 0:
            smem.scales[token, block] = quant.unpack_e8m0(scale)
