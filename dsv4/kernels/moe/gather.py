"""Codes and scales of tokens in the order of the experts' tiles, for sm_90a.

What TMA loads lies in neighbouring rows: a row for each pair of a token and an expert, and scales
by k block, in fp32. Scales of rounded rows of h are brought into the same order by who rounds them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.quantize import PAIRS, TEAM, VECTOR, load_vectors, quantize_vector
from dsv4.kernels.gemm.sm90.activations import scale_value
from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.layout import LIFT, WORD_CODES, interleaved_place, interleaved_word
from dsv4.kernels.moe.wide_plan import SCALE_COPIES

WARP = 32
BLOCK_VECTORS = K_BLOCK // VECTOR_BYTES
VECTOR_WORDS = VECTOR_BYTES // WORD_CODES
BATCH = 8  # loads of a lane under way
CTAS_PER_SM = 4
ROUNDED = 4  # k blocks of a row that a team of lanes rounds together
ROUND_CTAS_PER_SM = 8  # of one, too few loads are under way for DRAM


class Gathered(NamedTuple):
    """Outputs of the gather."""

    codes: cute.Tensor  # [P, D] e4m3, by position
    scales: cute.Tensor  # [2 D / 128, > P + T] fp32: by position, then by token, twice
    factors: cute.Tensor  # [P] fp32, routing weights by position


class GatherTokens:
    """Kernel: a CTA for 32 positions, or for 32 tokens of the shared expert.

    Args:
        is_folded: whether words of codes of routed rows are interleaved, and their scales lifted
            (`Kind.is_folded`).
    """

    threads = 256

    def __init__(self, hidden: int, top_k: int, is_folded: bool):
        self.hidden = hidden
        self.top_k = top_k
        self.is_folded = is_folded

    @cute.jit
    def launch(self, codes, scales, groups, counts, pairs, weights, to: Gathered, stream, num_sms):
        """Launch.

        Args:
            codes, scales: of tokens, [T, D] e4m3 and [T, D / 128] bytes.
            groups, counts, pairs, weights: as in `args`.
        """
        blocks = cute.ceil_div(pairs.shape[0], WARP) + cute.ceil_div(codes.shape[0], WARP)
        self.kernel(codes, scales, groups, counts, pairs, weights, to).launch(
            grid=[cutlass.min(blocks, num_sms * CTAS_PER_SM), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, codes, scales, groups, counts, pairs, weights, to: Gathered):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        positions, live = Int32(0), counts[1]
        last = counts[0] - 1
        if last >= 0:
            positions = groups[last, 1] + groups[last, 2]
        factors = cute.make_tensor(weights.iterator, cute.make_layout(cute.size(weights.shape)))
        routed = cute.ceil_div(positions, WARP)
        blocks = routed + cute.ceil_div(live, WARP)
        first, step = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        for block in cutlass.range(first, blocks, step, unroll=1):
            is_routed = block < routed
            start = cutlass.select_(is_routed, block, block - routed) * WARP
            count = cutlass.select_(is_routed, positions, live) - start
            # Of a lane: a row, and its token.
            token, row, lift = start + lane, start + lane, Float32(1.0)
            if is_routed:
                if cutlass.const_expr(self.is_folded):
                    lift = Float32(LIFT)
                token = Int32(0)
                if lane < count:
                    pair = pairs[row]
                    token = pair // self.top_k
                    if warp == 0:
                        to.factors[row] = factors[pair]
                self._copy_rows(codes, to.codes, token, start, count, warp)
            else:
                row += pairs.shape[0]
            if lane < count:
                self._store_scales(scales, to.scales, token, row, lift, warp)

    @cute.jit
    def _copy_rows(self, source, target, token, start, count, warp):
        """A warp's rows of codes among those of a block; lanes hold the rows' tokens."""
        lane, rows = cute.arch.lane_idx(), WARP // (self.threads // WARP)
        for i in cutlass.range_constexpr(rows):
            row = warp * rows + i
            own = cute.arch.shuffle_sync(token, row)
            if row < count:
                self._copy(source, target, own, start + row, lane)

    @cute.jit
    def _store_scales(self, scales, to, token, row, lift, warp):
        """Scales of a lane's row, every warp those of some k blocks: neighbouring lanes write
        neighbouring places."""
        blocks, warps = self.hidden // K_BLOCK, self.threads // WARP
        for i in cutlass.range_constexpr(-(-blocks // warps)):
            k_block = i * warps + warp
            if k_block < blocks:
                store_scale(to, k_block, row, scale_value(scales[token, k_block]) * lift)

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
                        if cutlass.const_expr(self.is_folded):
                            self._load_interleaved(source, token, vector, words[None, i])
                        else:
                            cute.autovec_copy(_vector(source, token, vector), words[None, i])
            for i in cutlass.range_constexpr(BATCH):
                if cutlass.const_expr(begin + i * WARP < vectors):
                    vector = begin + i * WARP + lane
                    if vector < vectors:
                        cute.autovec_copy(words[None, i], _vector(target, row, vector))

    @cute.jit
    def _load_interleaved(self, source: cute.Tensor, token, vector, words: cute.Tensor):
        """The words of a row that a vector of interleaved ones takes."""
        first = vector % BLOCK_VECTORS * VECTOR_WORDS
        for i in cutlass.range_constexpr(VECTOR_WORDS):
            word = vector // BLOCK_VECTORS * WARP + interleaved_word(first + i)
            words[i] = _word(source, token, word).load()


def _word(codes: cute.Tensor, row, word) -> cute.Pointer:
    """Four codes of a row."""
    offset = Int64(row) * codes.stride[0] + word * WORD_CODES
    return pointer_at(codes.iterator, offset, Uint32, align=WORD_CODES)


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


class QuantizeOrdered:
    """Kernel: codes [rows, K] and scales [2 K / 128, > rows] fp32 of h [rows, K] bf16.

    A team of lanes has some k blocks of a row, those of a CTA neighbouring rows.

    Args:
        top_k: k of each k + 1 rows are those of routed experts, which come first.
        is_folded: as of `GatherTokens`.
    """

    threads = 256

    def __init__(self, in_features: int, top_k: int, is_folded: bool):
        self.k_blocks = in_features // K_BLOCK
        self.top_k = top_k
        self.is_folded = is_folded
        self.parts = -(-self.k_blocks // ROUNDED)
        self.teams = self.threads // TEAM

    @cute.jit
    def launch(self, x, codes, scales, stream, num_sms):
        items = cute.ceil_div(x.shape[0], self.teams) * self.parts
        self.kernel(x, codes, scales).launch(
            grid=[cutlass.min(items, num_sms * ROUND_CTAS_PER_SM), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        lane, team = thread % TEAM, thread // TEAM
        rows = x.shape[0]
        items = cute.ceil_div(rows, self.teams) * self.parts
        first, step = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        for item in cutlass.range(first, items, step, unroll=1):
            row, block = item // self.parts * self.teams + team, item % self.parts * ROUNDED
            words = cute.make_rmem_tensor((PAIRS, ROUNDED), Uint32)
            words.fill(0)
            for i in cutlass.range_constexpr(ROUNDED):
                if row < rows and block + i < self.k_blocks:
                    load_vectors(x, row, block + i, lane, words[None, i])
            for i in cutlass.range_constexpr(ROUNDED):
                # Lanes of a warp shuffle together, with rows or without.
                vector, scale = quantize_vector(words[None, i])
                if row < rows and block + i < self.k_blocks:
                    self._store(codes, scales, row, block + i, lane, vector, scale)

    @cute.jit
    def _store(self, codes: cute.Tensor, scales: cute.Tensor, row, k_block, lane, vector, scale):
        """A lane's codes of a group, and the group's scale."""
        lift = Float32(1.0)
        if cutlass.const_expr(self.is_folded):
            is_routed = row < codes.shape[0] // (self.top_k + 1) * self.top_k
            lift = cutlass.select_(is_routed, Float32(LIFT), lift)
            for i in cutlass.range_constexpr(2):
                word = 2 * lane + i
                place = cutlass.select_(is_routed, interleaved_place(word), word)
                _word(codes, row, k_block * WARP + place).store(vector[i])
        else:
            offset = Int64(row) * codes.stride[0] + (k_block * K_BLOCK + lane * VECTOR)
            target = pointer_at(codes.iterator, offset, Uint32, align=VECTOR)
            cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(2)))
        if lane == 0:
            store_scale(scales, k_block, row, quant.unpack_e8m0(scale) * lift)
