"""e4m3 codes and E8M0 scales of bf16 activations, 16 lanes a group of 128; any architecture.

An activation is rounded to one code, or is the sum of two, its terms: x = scale * (c0 + c1 / 16).
A bf16 value has 8 significant bits, of which c0 takes the first four. What it leaves is at most
half of its last place and a multiple of 1/16 of that: the other four bits. So two terms are exact
where |x| >= 2^-6 scale, and within 2^-14 scale, which is less than 2^-21 of the group's largest
value, everywhere.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, cute

from dsv4.kernels.gemm.config import K_BLOCK, TERM_ROWS, TERMS_AMAX_FLOOR
from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.pointers import pointer_at

WARP = 32
TEAM = 16  # lanes that share a group
WARP_TEAMS = WARP // TEAM
VECTOR = K_BLOCK // TEAM  # elements of a lane
PAIRS = VECTOR // 2  # registers that hold them
BATCH = 4  # loads of a thread under way
CTAS_PER_SM = 4  # of one, too few loads are under way for DRAM; of eight, a launch takes longer
SECOND_TERM = 2.0**-4  # of the scale: 16, the largest second term, becomes 256


def as_bytes(scale: cute.Tensor) -> cute.Tensor:
    """E8M0 scales as bytes; fp32 ones as they are."""
    if scale.element_type is cutlass.Float32:
        return scale
    return cute.make_tensor(cute.recast_ptr(scale.iterator, dtype=Uint8), scale.layout)


@cute.jit
def load_vectors(x: cute.Tensor, token, k_block, lane, words: cute.Tensor) -> None:
    """words[pair] = this lane's elements of x[token, k_block * 128:]."""
    offset = Int64(token) * x.stride[0] + (k_block * K_BLOCK + lane * VECTOR)
    source = pointer_at(x.iterator, offset, Uint32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PAIRS)), words)


def quantize_vector(words: cute.Tensor) -> tuple[cute.Tensor, Int32]:
    """Codes of a lane's pairs, as two words, and the E8M0 byte of the team's group."""
    pairs = [words[i] for i in range(PAIRS)]
    scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, TEAM))
    return cute.recast_tensor(quant.quantize_e4m3(pairs, scale), Uint32), scale


def term_vectors(words: cute.Tensor, terms: int) -> tuple[list[cute.Tensor], Int32]:
    """Codes of a lane's pairs, of each term as two words, and the E8M0 byte of the team's group."""
    if terms == 1:
        codes, scale = quantize_vector(words)
        return [codes], scale
    pairs = [words[i] for i in range(PAIRS)]
    scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, TEAM), TERMS_AMAX_FLOOR)
    return [cute.recast_tensor(t, Uint32) for t in quant.split_e4m3(pairs, scale)], scale


def code_row(token, term: int, terms: int):
    """Row of a term's codes of a token: eight tokens of a term beside those of the next one."""
    if terms == 1:
        return token
    return token // TERM_ROWS * (TERM_ROWS * terms) + term * TERM_ROWS + token % TERM_ROWS


class QuantizeRows:
    """Kernel: codes [rows, K], as `code_row` has them, and scales [T, K / 128] of x [T, K] bf16."""

    threads = 256

    def __init__(self, in_features: int, terms: int = 1):
        self.k_blocks = in_features // K_BLOCK
        self.terms = terms

    @cute.jit
    def launch(self, x, codes, scales, stream, num_sms):
        teams = self.threads // TEAM
        ctas = cute.ceil_div(x.shape[0] * self.k_blocks, teams)
        self.kernel(x, codes, scales).launch(
            grid=[cutlass.min(ctas, num_sms * CTAS_PER_SM), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        lane, teams = thread % TEAM, self.threads // TEAM
        step = cute.arch.grid_dim()[0] * teams
        # Of a warp, whose lanes shuffle together even where only one of its teams has a group.
        first = cute.arch.block_idx()[0] * teams + thread // WARP * WARP_TEAMS
        team = thread % WARP // TEAM
        groups = x.shape[0] * self.k_blocks
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        for start in cutlass.range(first, groups, step * BATCH, unroll=1):
            words = cute.make_rmem_tensor((PAIRS, BATCH), Uint32)
            words.fill(0)
            for i in cutlass.range_constexpr(BATCH):
                group = start + team + i * step
                if group < groups:
                    token, k_block = group // self.k_blocks, group % self.k_blocks
                    load_vectors(x, token, k_block, lane, words[None, i])
            for i in cutlass.range_constexpr(BATCH):
                group = start + team + i * step
                if start + i * step < groups:
                    vectors, scale = term_vectors(words[None, i], self.terms)
                    if group < groups:
                        self._store(codes, scales, group, lane, vectors, scale)

    @cute.jit
    def _store(self, codes: cute.Tensor, scales: cute.Tensor, group, lane, vectors, scale):
        """A lane's codes of a group, and the group's scale."""
        token, k_block = group // self.k_blocks, group % self.k_blocks
        self.store_codes(codes, token, k_block, lane, vectors)
        if lane == 0:
            offset = Int64(token) * scales.stride[0] + k_block
            pointer_at(scales.iterator, offset, Uint8, align=1).store(Uint8(scale))

    @cute.jit
    def store_codes(self, codes: cute.Tensor, token, k_block, lane, vectors):
        """A lane's codes of a group."""
        for term in cutlass.range_constexpr(self.terms):
            row = Int64(code_row(token, term, self.terms))
            offset = row * codes.stride[0] + (k_block * K_BLOCK + lane * VECTOR)
            target = pointer_at(codes.iterator, offset, Uint32, align=VECTOR)
            cute.autovec_copy(vectors[term], cute.make_tensor(target, cute.make_layout(2)))
