"""Codes and scales of tokens in the order of the experts' tiles, for sm_90a.

What TMA loads lies in neighbouring rows: a row for each pair of a token and an expert, and scales
by k block, in fp32. Scales of rounded rows of h are brought into the same order by who rounds them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.quantize import QuantizeRows
from dsv4.kernels.gemm.sm90.activations import scale_value
from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.wide_plan import SCALE_COPIES

WARP = 32
BATCH = 8  # loads of a lane under way
CTAS_PER_SM = 4


class Gathered(NamedTuple):
    """Outputs of the gather."""

    codes: cute.Tensor  # [P, D] e4m3, by position
    scales: cute.Tensor  # [2 D / 128, > P + T] fp32: by position, then by token, twice
    factors: cute.Tensor  # [P] fp32, routing weights by position


class GatherTokens:
    """Kernel: a warp for each position, and for each token of the shared expert.

    Args:
        lift: factor in the scales of routed rows.
    """

    threads = 256

    def __init__(self, hidden: int, top_k: int, lift: float):
        self.hidden = hidden
        self.top_k = top_k
        self.lift = lift

    @cute.jit
    def launch(self, codes, scales, groups, counts, pairs, weights, to: Gathered, stream, num_sms):
        """Launch.

        Args:
            codes, scales: of tokens, [T, D] e4m3 and [T, D / 128] bytes.
            groups, counts, pairs, weights: as in `args`.
        """
        rows = pairs.shape[0] + codes.shape[0]
        warps = self.threads // WARP
        self.kernel(codes, scales, groups, counts, pairs, weights, to).launch(
            grid=[cutlass.min(cute.ceil_div(rows, warps), num_sms * CTAS_PER_SM), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, codes, scales, groups, counts, pairs, weights, to: Gathered):
        lane = cute.arch.lane_idx()
        warps = self.threads // WARP
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        positions, live = Int32(0), counts[1]
        last = counts[0] - 1
        if last >= 0:
            positions = groups[last, 1] + groups[last, 2]
        factors = cute.make_tensor(weights.iterator, cute.make_layout(cute.size(weights.shape)))
        first = Int32(cute.arch.block_idx()[0]) * warps + warp
        step = Int32(cute.arch.grid_dim()[0]) * warps
        for index in cutlass.range(first, positions + live, step, unroll=1):
            is_routed = index < positions
            token, row, lift = index - positions, index - positions, Float32(1.0)
            if is_routed:
                pair = pairs[index]
                token, row, lift = pair // self.top_k, index, Float32(self.lift)
                if lane == 0:
                    to.factors[row] = factors[pair]
                self._copy(codes, to.codes, token, row, lane)
            else:
                row += pairs.shape[0]
            for block in cutlass.range_constexpr(0, self.hidden // K_BLOCK, WARP):
                k_block = block + lane
                if k_block < self.hidden // K_BLOCK:
                    value = scale_value(scales[token, k_block]) * lift
                    store_scale(to.scales, k_block, row, value)

    @cute.jit
    def _copy(self, source: cute.Tensor, target: cute.Tensor, token, row, lane):
        """A row of codes."""
        vectors = self.hidden // VECTOR_BYTES
        for begin in cutlass.range_constexpr(0, vectors, WARP * BATCH):
            words = cute.make_rmem_tensor((4, BATCH), Uint32)
            for i in cutlass.range_constexpr(BATCH):
                if cutlass.const_expr(begin + i * WARP < vectors):
                    vector = begin + i * WARP + lane
                    if vector < vectors:
                        cute.autovec_copy(_vector(source, token, vector), words[None, i])
            for i in cutlass.range_constexpr(BATCH):
                if cutlass.const_expr(begin + i * WARP < vectors):
                    vector = begin + i * WARP + lane
                    if vector < vectors:
                        cute.autovec_copy(words[None, i], _vector(target, row, vector))


def _vector(codes: cute.Tensor, row, vector) -> cute.Tensor:
    """16 codes of a row."""
    offset = Int64(row) * codes.stride[0] + vector * VECTOR_BYTES
    return cute.make_tensor(pointer_at(codes.iterator, offset, Uint32), cute.make_layout(4))


@cute.jit
def store_scale(scales: cute.Tensor, k_block, row, value: Float32):
    """Store a scale in every copy."""
    blocks = scales.shape[0] // SCALE_COPIES
    for i in cutlass.range_constexpr(SCALE_COPIES):
        offset = Int64(i * blocks + k_block) * scales.stride[0] + (row + i)
        pointer_at(scales.iterator, offset, Float32, align=4).store(value)


class QuantizeOrdered(QuantizeRows):
    """Kernel: codes [rows, K] and scales [2 K / 128, > rows] fp32 of h [rows, K] bf16.

    Args:
        top_k: k of each k + 1 rows are those of routed experts, which come first.
        lift: factor in their scales.
    """

    def __init__(self, in_features: int, top_k: int, lift: float):
        super().__init__(in_features)
        self.top_k = top_k
        self.lift = lift

    @cute.jit
    def _store(self, codes: cute.Tensor, scales: cute.Tensor, group, lane, vectors, scale):
        row, k_block = group // self.k_blocks, group % self.k_blocks
        self.store_codes(codes, row, k_block, lane, vectors)
        if lane == 0:
            routed = codes.shape[0] // (self.top_k + 1) * self.top_k
            lift = cutlass.select_(row < routed, Float32(self.lift), Float32(1.0))
            store_scale(scales, k_block, row, quant.unpack_e8m0(scale) * lift)
