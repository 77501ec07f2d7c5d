"""Epilogue of a linear whose outputs the next one takes in e4m3: codes, and a scale of every 128.

The 128 rows of a tile are a group of codes of each of its tokens, one in each thread of the
epilogue. Outputs are rounded to bf16 first: the codes are those of the rounded outputs.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int64, Uint8, cute

from dsv4.kernels.gemm.operands import OutputTile
from dsv4.kernels.gemm.sm100.context import LinearContext
from dsv4.kernels.gemm.sm100.plan import EPILOGUE_WARPS, ROWS, LinearPlan, NamedBarriers
from dsv4.kernels.kit.column_codes import column_codes, column_maxima
from dsv4.kernels.kit.pointers import pointer_at


class RoundedTile:
    """The device functions of the epilogue `Rounding`."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan

    @cute.jit
    def store(self, ctx: LinearContext, tile: OutputTile, sums: cute.Tensor, token, turn):
        """Write codes and scales of a tile's tokens from one on: a warp has 32 rows of a token,
        which lie side by side.

        Args:
            sums: of the thread's row.
            turn: of the tile.
        """
        y, y_scale = ctx.operands.ys[0], ctx.operands.y_scale[0]
        plan, thread = self.plan, cute.arch.thread_idx()[0]
        count = plan.stored_tokens
        values = []
        for i in cutlass.range_constexpr(count):
            values.append(sums[i].to(BFloat16).to(Float32))
        # Passes over tokens follow each other on both boards by turns, those of the next tile, too,
        # which may be of other tokens.
        passes, own = plan.own_tokens // count, token - tile.token_tile * plan.tokens
        place = (turn * passes + own // count) % 2 * (EPILOGUE_WARPS * count)
        board = ctx.smem.maxima + cute.assume(place, divby=EPILOGUE_WARPS * count)
        maxima = column_maxima(values, board, count, NamedBarriers.MAXIMA_THERE)
        codes, scales = column_codes(values, maxima)
        row = tile.row_tile * ROWS + thread
        for i in cutlass.range_constexpr(count):
            if token + i < y.shape[0]:
                offset = Int64(token + i) * y.stride[0] + row
                pointer_at(y.iterator, offset, Uint8, align=1).store(codes[i])
                if thread == i:
                    offset = Int64(token + i) * y_scale.stride[0] + tile.row_tile
                    pointer_at(y_scale.iterator, offset, Uint8, align=1).store(Uint8(scales[i]))
