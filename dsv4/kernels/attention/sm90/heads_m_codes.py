"""Epilogue of the heads-in-M kernel whose rows become e4m3 codes of two terms (`row_codes`)."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.row_codes import GROUP_PAIRS, QUAD, store_group_codes
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_epilogue import Epilogue, Staging
from dsv4.kernels.attention.sm90.plan import HeadsMPlan
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.epilogue import WARP_ROWS
from dsv4.kernels.kit.wgmma import by_row


class CodesEpilogue(Epilogue):
    """Epilogue of launches without splits, whose quads of lanes hold whole groups of a scale.

    Tokens of one piece beside those of several stay bf16 rows.
    """

    def __init__(self, num_query_heads: int, plan: HeadsMPlan):
        super().__init__(num_query_heads, plan)
        assert plan.pv_dim == K_BLOCK, f"sub-tiles have {plan.pv_dim} columns, groups {K_BLOCK}"
        self.can_stage = False

    @cute.jit
    def store(
        self, ctx: HeadsMContext, coord, subtile, acc, scales, column, is_sliced, staging: Staging
    ):
        """Write a warp's rows from `column` on: codes of all that are accumulated, or of one
        sub-tile where columns are sliced."""
        if cutlass.const_expr(ctx.tiling.is_plain):
            size = cute.size(acc) // self.plan.subtiles
            for i in cutlass.range_constexpr(self.plan.subtiles):
                group = cute.make_tensor(acc.iterator + i * size, cute.make_layout(size))
                self._store_group(ctx, coord, group, scales, column // K_BLOCK + i)
        elif cutlass.const_expr(ctx.tiling.has_pieces):
            super().store(ctx, coord, subtile, acc, scales, column, is_sliced, staging)
        else:
            self._store_group(ctx, coord, subtile, scales, column // K_BLOCK)

    @cute.jit
    def _store_group(self, ctx: HeadsMContext, coord, group: cute.Tensor, scales, block):
        """Round and write two rows of a thread's quad in a group of columns.

        Args:
            block: the group, among those of a head.
        """
        row = cute.arch.thread_idx()[0] % 128 // 32 * WARP_ROWS + cute.arch.lane_idx() // QUAD
        rows = by_row(group)
        for r in cutlass.range_constexpr(2):
            pairs = [
                quant.pack_bf16(rows[r, 0, j] * scales[r], rows[r, 1, j] * scales[r])
                for j in range(GROUP_PAIRS)
            ]
            store_group_codes(
                *(ctx.operands.rounded, coord.token, coord.head + row + 8 * r, block, pairs),
                *(self.num_query_heads, self.plan.head_dim),
            )
