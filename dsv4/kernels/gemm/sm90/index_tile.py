"""Epilogue of a linear whose outputs are index heads: codes, and a scale of every head.

The 128 rows of a tile lie in the registers of both warpgroups, and meet in shared memory, as those
of `rounded_tile` do; what becomes of them there is `index_heads`'.
"""

from __future__ import annotations

from cutlass import Int32, cute

from dsv4.kernels.gemm.epilogues import IndexRounding
from dsv4.kernels.gemm.index_heads import IndexHeads, is_one_of
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.plan import FEW_TOKENS, LinearPlan
from dsv4.kernels.gemm.sm90.activations import CONSUMERS
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.gemm.sm90.rounded_tile import RoundedTile


class IndexTile(RoundedTile):
    """The device functions of the epilogue `IndexRounding`; between `stage` and `store` all
    consumers meet."""

    def __init__(self, plan: LinearPlan):
        super().__init__(plan)
        self.weights = [isinstance(config, IndexRounding) for config in plan.epilogues]
        self.heads = IndexHeads(CONSUMERS, plan.own_groups * 8) if any(self.weights) else None
        # Of many tokens it waits for what is on its way while sums are staged: registers that
        # hold it sooner are those of products.
        self.loads_ahead = plan.tokens <= FEW_TOKENS

    def is_here(self, weight: Int32 | int):
        """Whether it is the epilogue of a weight."""
        return is_one_of(self.weights, weight)

    def first_token(self, ctx: LinearContext, tile: OutputTile) -> Int32:
        """First of the CTA's tokens of a tile."""
        first = tile.token_tile * self.plan.tokens
        return first + ctx.rank * (self.plan.own_groups * 8) if self.plan.parts > 1 else first

    def load_position(self, ctx: LinearContext, tile: OutputTile, held) -> None:
        """Ask for the positions of the CTA's tokens of a token tile."""
        self.heads.load_position(ctx.operands.heads[0], self.first_token(ctx, tile), held[0])

    @cute.jit
    def load_turns(self, ctx: LinearContext, tile: OutputTile, held):
        """Ask for what the first tokens of a tile are rotated by, where it is an index head's."""
        if self.is_here(tile.weight):
            self.heads.load_turns(ctx.operands.heads[0], held[0], 0, held[1])

    @cute.jit
    def store_heads(self, ctx: LinearContext, tile: OutputTile, held):
        """Write the codes and scales of the CTA's tokens of a tile."""
        first = self.first_token(ctx, tile)
        self.heads.store(ctx.operands, tile, ctx.smem.staged, first, *held)
