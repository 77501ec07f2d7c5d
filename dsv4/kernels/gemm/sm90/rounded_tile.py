"""Epilogue of a linear whose outputs the next one takes in e4m3: codes, and a scale of every 128.

The 128 rows of a tile are a group of codes of each of its tokens, and lie in the registers of both
warpgroups. They meet in shared memory, rounded to bf16, and 16 lanes take a token, as those that
round activations elsewhere (`gemm.quantize`): the codes are those of the rounded outputs.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Int64, Uint8, Uint32, cute

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.plan import STAGED_ROW, UNIT_ROWS, LinearPlan
from dsv4.kernels.gemm.quantize import PAIRS, TEAM, VECTOR, quantize_vector
from dsv4.kernels.gemm.sm90.activations import CONSUMERS
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.kit.pointers import pointer_at

TEAMS = CONSUMERS // TEAM


class RoundedTile:
    """The device functions of the epilogue `Rounding`; between them all consumers meet."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def stage(self, ctx: LinearContext, unit, group, lane, values):
        """Round a lane's four outputs of a unit of 16 rows and a group of 8 own tokens, and put
        them where their tokens lie."""
        for c in cutlass.range_constexpr(2):
            token = group * 8 + lane % 4 * 2 + c
            for r in cutlass.range_constexpr(2):
                row = unit * UNIT_ROWS + lane // 4 + r * 8
                target = ctx.smem.staged + (token * STAGED_ROW + row)
                target.store(values[r * 2 + c].to(BFloat16))

    @cute.jit
    def store(self, ctx: LinearContext, tile: OutputTile):
        """Write the codes and scales of the CTA's tokens of a tile."""
        plan, y, y_scale = self.plan, ctx.operands.ys[0], ctx.operands.y_scale[0]
        thread = cute.arch.thread_idx()[0]
        lane, tokens = thread % TEAM, plan.own_groups * 8
        first_token = tile.token_tile * plan.tokens
        if cutlass.const_expr(tokens < plan.tokens):
            first_token += ctx.rank * tokens
        # A multiple of 8: both teams of a warp, whose lanes shuffle, take as many turns.
        for own in cutlass.range(thread // TEAM, tokens, TEAMS, unroll=1):
            words = cute.make_rmem_tensor(PAIRS, Uint32)
            place = cute.assume(own * STAGED_ROW + lane * VECTOR, divby=VECTOR)
            source = cute.recast_ptr(ctx.smem.staged + place, dtype=Uint32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PAIRS)), words)
            codes, scale = quantize_vector(words)
            token = first_token + own
            if token < y.shape[0]:
                offset = Int64(token) * y.stride[0] + (tile.row_tile * K_BLOCK + lane * VECTOR)
                target = pointer_at(y.iterator, offset, Uint32, align=VECTOR)
                cute.autovec_copy(codes, cute.make_tensor(target, cute.make_layout(2)))
                if lane == 0:
                    offset = Int64(token) * y_scale.stride[0] + tile.row_tile
                    pointer_at(y_scale.iterator, offset, Uint8, align=1).store(Uint8(scale))
