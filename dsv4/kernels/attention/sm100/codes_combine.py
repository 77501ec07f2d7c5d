"""Combine kernel of Blackwell whose rows become e4m3 codes of two terms (`gemm.quantize`)."""

import cutlass
from cutlass import BFloat16, Int64, Uint8, Uint32, cute

from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.sm100.combine import Combine
from dsv4.kernels.gemm.config import K_BLOCK, TERMS, TERMS_AMAX_FLOOR
from dsv4.kernels.gemm.quantize import code_row
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.pointers import pointer_at


class CodesCombine(Combine):
    """Combine whose output is codes, and their scales for 128 columns: as many lanes as hold these
    lie in one warp."""

    def __init__(self, config: PagedFmhaConfig):
        super().__init__(config.head_dim, config.num_query_heads, config.sink_mode, BFloat16)
        self.group_lanes = K_BLOCK // self.plan.vector
        assert self.plan.vector == 4, f"a thread has {self.plan.vector} columns, codes are words"

    def _outputs(self, arguments: PagedArguments) -> tuple[cute.Tensor, ...]:
        return arguments.codes, arguments.code_scales

    @cute.jit
    def _store(self, outputs: tuple, token, head, column, values: cute.Tensor):
        codes, code_scales = outputs
        pairs = [quant.pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(2)]
        amax = quant.amax_bf16(pairs, self.group_lanes)
        scale = quant.e8m0_scale_e4m3(amax, TERMS_AMAX_FLOOR)
        terms = quant.split_e4m3(pairs, scale)
        for term in cutlass.range_constexpr(TERMS):
            row = Int64(code_row(token, term, TERMS))
            offset = row * codes.stride[0] + head * self.head_dim + column
            target = pointer_at(codes.iterator, offset, Uint32, align=4)
            target.store(cute.recast_tensor(terms[term], Uint32)[0])
        if column % K_BLOCK == 0:
            groups = self.head_dim // K_BLOCK
            offset = Int64(token) * code_scales.stride[0] + head * groups + column // K_BLOCK
            pointer_at(code_scales.iterator, offset, Uint8, align=1).store(Uint8(scale))
