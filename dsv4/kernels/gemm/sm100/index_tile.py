"""Epilogue of a linear whose outputs are index heads: codes, and a scale of every head.

A thread of the epilogue has a row of the head, which is a tile's, of some tokens; they meet in
shared memory, rounded to bf16, and what becomes of them there is `index_heads`'.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Int32, cute, pipeline

from dsv4.kernels.gemm.epilogues import IndexRounding
from dsv4.kernels.gemm.index_heads import IndexHeads, is_one_of
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.plan import STAGED_ROW
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import EPILOGUE_WARPS, LinearPlan, NamedBarriers

THREADS = 32 * EPILOGUE_WARPS


class IndexTile:
    """The device functions of the epilogue `IndexRounding`."""

    def __init__(self, plan: LinearPlan):
        self.weights = [isinstance(config, IndexRounding) for config in plan.epilogues]
        self.heads = IndexHeads(THREADS, plan.stored_tokens) if any(self.weights) else None

    def is_here(self, weight: Int32 | int):
        """Whether it is the epilogue of a weight."""
        return is_one_of(self.weights, weight)

    @cute.jit
    def store(self, ctx: LinearContext, tile: OutputTile, sums: cute.Tensor, token):
        """Write codes and scales of a head's tokens from one on.

        Args:
            sums: of the thread's row.
        """
        heads, operands = self.heads, ctx.operands
        position, turns = heads.held()
        heads.load_position(operands.heads[0], token, position)
        heads.load_turns(operands.heads[0], position, 0, turns)
        # All have read the rows before.
        self._sync()
        for i in cutlass.range_constexpr(heads.tokens):
            target = ctx.smem.staged + (i * STAGED_ROW + cute.arch.thread_idx()[0])
            target.store(sums[i].to(BFloat16))
        self._sync()
        heads.store(operands, tile, ctx.smem.staged, token, position, turns)

    def _sync(self) -> None:
        pipeline.NamedBarrier(NamedBarriers.HEADS_THERE, THREADS).arrive_and_wait()
