"""Rows in NVFP4: e2m1 codes, an e4m3 scale for each 16 of them, and one fp32 scale for all. Those
of tokens are written by the gate, those of h by the first product."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.fp4 import block_scale, pack_e2m1, per_whole
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.layer_config import NVFP4_GROUP

WARP = 32
MATRICES = 3  # that `global_scales` has rows of, and as many of their inputs
LANE_CODES = 8  # neighbouring elements of a lane
LANES = NVFP4_GROUP // LANE_CODES  # that have a block
H_ROW = 5  # of `global_scales`


class PackedRows(NamedTuple):
    """Codes and scales of rows."""

    codes: cute.Tensor  # [rows, K / 2] bytes
    scales: cute.Tensor  # [rows, K / 16] bytes


class PackedTokens(NamedTuple):
    """Tokens, and what their fp32 scale comes from and goes to."""

    rows: PackedRows
    whole: cute.Tensor  # [1] fp32, written
    global_scales: cute.Tensor  # [6, E] fp32


@cute.jit
def scale_of_tokens(global_scales: cute.Tensor):
    """The largest scale of the inputs of w1 and w3, the same in all lanes: scales are positive."""
    lane, experts = cute.arch.lane_idx(), global_scales.shape[1]
    largest = Int32(0)
    for first in cutlass.range(0, experts, WARP, unroll=1):
        for row in cutlass.range_constexpr(MATRICES, H_ROW):
            if first + lane < experts:
                bits = global_scales[row, first + lane].bitcast(Int32)
                largest = cutlass.max(largest, bits)
    return cute.arch.warp_redux_sync(largest, "max").bitcast(Float32)


@cute.jit
def pack_tokens(
    tokens: PackedTokens, words: cute.Tensor, token: Int32, k_block: Int32, place: Int32, whole
) -> None:
    """Write NVFP4 codes and scales of 128 elements of a token, which a quad holds.

    Args:
        words: [word, chunk], bf16 pairs of eight neighbouring elements of each 32.
        place: in the quad.
        whole: of `scale_of_tokens`.
    """
    codes, scales = tokens.rows.codes, tokens.rows.scales
    chunk_words, chunks = words.shape
    chunk_codes = K_BLOCK // chunks
    factor = per_whole(whole)
    for c in cutlass.range_constexpr(chunks):
        pairs = [words[i, c] for i in range(chunk_words)]
        byte, inverse = block_scale(quant.amax_bf16(pairs, lanes=LANES), factor, whole)
        values = [value * inverse for pair in pairs for value in quant.unpack_bf16(pair)]
        word = pack_e2m1(values)
        if token < codes.shape[0]:
            element = k_block * K_BLOCK + c * chunk_codes + place * LANE_CODES
            offset = Int64(token) * codes.stride[0] + element // 2
            pointer_at(codes.iterator, offset, Uint32, align=4).store(word)
            if place % LANES == 0:
                scales[token, element // NVFP4_GROUP] = Uint8(byte)
