"""Epilogue of the heads-in-M kernel whose rows become e4m3 codes of two terms (`gemm.quantize`)."""

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, cute

from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_epilogue import Epilogue, Staging
from dsv4.kernels.attention.sm90.plan import HeadsMPlan
from dsv4.kernels.gemm.config import K_BLOCK, TERMS, TERMS_AMAX_FLOOR
from dsv4.kernels.gemm.quantize import code_row
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.epilogue import WARP_ROWS, quad_transpose
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.wgmma import by_row

QUAD = 4  # lanes that hold a row of an accumulator sub-tile, which is a group of a scale
# Byte selectors of a permutation of two words: their lower halves, their upper ones.
LOWER, UPPER = 0x5410, 0x7632


class CodesEpilogue(Epilogue):
    """Epilogue of plain launches, whose quads of lanes hold whole groups of a scale.

    Where there are splits or column slices, rows stay bf16.
    """

    def __init__(self, num_query_heads: int, plan: HeadsMPlan):
        super().__init__(num_query_heads, plan)
        assert plan.pv_dim == K_BLOCK, f"sub-tiles have {plan.pv_dim} columns, groups {K_BLOCK}"
        self.can_stage = False

    @cute.jit
    def store(
        self, ctx: HeadsMContext, coord, subtile, acc, scales, column, is_sliced, staging: Staging
    ):
        """Write a warp's rows from `column` on: codes of all that are accumulated."""
        if cutlass.const_expr(ctx.tiling.is_plain):
            size = cute.size(acc) // self.plan.subtiles
            for i in cutlass.range_constexpr(self.plan.subtiles):
                group = cute.make_tensor(acc.iterator + i * size, cute.make_layout(size))
                self._store_group(ctx, coord, group, scales, column // K_BLOCK + i)
        else:
            super().store(ctx, coord, subtile, acc, scales, column, is_sliced, staging)

    @cute.jit
    def _store_group(self, ctx: HeadsMContext, coord, group: cute.Tensor, scales, block):
        """Round and write two rows of a thread's quad in a group of columns.

        Args:
            block: the group, among those of a head.
        """
        lane, head_dim = cute.arch.lane_idx(), self.plan.head_dim
        lane_in_quad = lane % QUAD
        row = cute.arch.thread_idx()[0] % 128 // 32 * WARP_ROWS + lane // QUAD
        codes, code_scales = ctx.operands.rounded
        rows = by_row(group)
        for r in cutlass.range_constexpr(2):
            pairs = [
                quant.pack_bf16(rows[r, 0, j] * scales[r], rows[r, 1, j] * scales[r])
                for j in range(K_BLOCK // 8)
            ]
            scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, QUAD), TERMS_AMAX_FLOOR)
            terms = quant.split_e4m3(pairs, scale)
            head = coord.head + row + 8 * r
            column = head * head_dim + block * K_BLOCK + lane_in_quad * VECTOR_BYTES
            for term in cutlass.range_constexpr(TERMS):
                offset = Int64(code_row(coord.token, term, TERMS)) * codes.stride[0] + column
                target = pointer_at(codes.iterator, offset, Uint32)
                words = cute.recast_tensor(terms[term], Int32)
                for i in cutlass.range_constexpr(cute.size(words) // QUAD):
                    vector = gather_quad(words, i, lane_in_quad)
                    if head < self.num_query_heads:
                        layout = cute.make_layout(QUAD)
                        cute.autovec_copy(
                            vector, cute.make_tensor(target + i * QUAD * QUAD, layout)
                        )
            if (lane_in_quad == 0) & (head < self.num_query_heads):
                offset = Int64(coord.token) * code_scales.stride[0]
                offset += head * (head_dim // K_BLOCK) + block
                pointer_at(code_scales.iterator, offset, Uint8, align=1).store(Uint8(scale))


@cute.jit
def gather_quad(words: cute.Tensor, i: cutlass.Constexpr, lane_in_quad) -> cute.Tensor:
    """16 neighbouring bytes of a row for each lane of a quad, of 64 from 64 i on.

    Args:
        words: of a lane, each with its two bytes of two neighbouring 8-byte groups.
    """
    part = cute.make_rmem_tensor(QUAD, Int32)
    for k in cutlass.range_constexpr(QUAD):
        part[k] = words[i * QUAD + k]
    quad_transpose(part, lane_in_quad)
    vector = cute.make_rmem_tensor(QUAD, Uint32)
    for half, selector in enumerate((LOWER, UPPER)):
        for pair in (0, 1):
            low, high = Uint32(part[2 * pair]), Uint32(part[2 * pair + 1])
            vector[2 * half + pair] = Uint32(cute.arch.prmt(low, high, selector))
    return vector
