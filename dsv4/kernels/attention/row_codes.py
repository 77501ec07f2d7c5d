"""e4m3 codes of two terms (`gemm.quantize`) of output rows, of which a quad of lanes has pairs of
neighbouring columns, as accumulators of wgmma and loads of 16x256b from TMEM have them."""

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, cute

from dsv4.kernels.gemm.config import K_BLOCK, TERMS, TERMS_AMAX_FLOOR
from dsv4.kernels.gemm.quantize import code_row
from dsv4.kernels.kit import quant
from dsv4.kernels.kit.epilogue import quad_transpose
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import VECTOR_BYTES

QUAD = 4  # lanes that hold a row
GROUP_PAIRS = K_BLOCK // 2 // QUAD  # of neighbouring values, of a lane
# Byte selectors of a permutation of two words: their lower halves, their upper ones.
LOWER, UPPER = 0x5410, 0x7632


@cute.jit
def store_group_codes(
    rounded: tuple[cute.Tensor, ...],
    token,
    head,
    block,
    pairs,
    num_query_heads: cutlass.Constexpr,
    head_dim: cutlass.Constexpr,
):
    """Split a row's values of a group, round the terms, and write codes and scale.

    Args:
        rounded: codes and their scales, of a launch.
        head: of the row; from `num_query_heads` on it is padding.
        block: the group, among those of a head.
        pairs: bf16 values of a lane of the row's quad, `GROUP_PAIRS` words.
    """
    codes, code_scales = rounded
    lane_in_quad = cute.arch.lane_idx() % QUAD
    scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, QUAD), TERMS_AMAX_FLOOR)
    terms = quant.split_e4m3(pairs, scale)
    column = head * head_dim + block * K_BLOCK + lane_in_quad * VECTOR_BYTES
    for term in cutlass.range_constexpr(TERMS):
        offset = Int64(code_row(token, term, TERMS)) * codes.stride[0] + column
        target = pointer_at(codes.iterator, offset, Uint32)
        words = cute.recast_tensor(terms[term], Int32)
        for i in cutlass.range_constexpr(cute.size(words) // QUAD):
            vector = gather_quad(words, i, lane_in_quad)
            if head < num_query_heads:
                layout = cute.make_layout(QUAD)
                cute.autovec_copy(vector, cute.make_tensor(target + i * QUAD * QUAD, layout))
    if (lane_in_quad == 0) & (head < num_query_heads):
        offset = Int64(token) * code_scales.stride[0] + head * (head_dim // K_BLOCK) + block
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
