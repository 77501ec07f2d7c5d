"""Gate of a router: logits x W^T in bf16 with fp32 sums, for sm_90a and sm_100a.

A CTA has 32 experts, some tiles of 8 tokens, and one slice of K (512) or all of them, one after the
other. Each of its four warps takes a part of a slice (128): weights in M, tokens in N. The order of
a logit's sums is fixed: a part is a chain of tensor-core products from zero, parts are added in
order, then slices. So the bits of a token depend on neither the number of tokens nor their places.

Both operands go from global memory to registers in 16-byte vectors: k may be permuted within a
chain, and a lane's eight neighbouring elements are two fragments of either operand. A quad so holds
128 elements of a token, which are one group of FP8 quantisation: CTAs of some experts also write
its codes and its scale, those of the last ones NVFP4 codes and scales where they are wanted.

Weights are loaded before `griddepcontrol.wait`.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.vectors import LINE_BYTES, address_of, prefetch_l2
from dsv4.kernels.moe.packed_rows import PackedTokens, pack_tokens, scale_of_tokens
from dsv4.kernels.moe.routing import (
    ARRIVAL_WORDS,
    EXPERT_TILE,
    GATE_THREADS,
    MOST_TILES,
    PART,
    SLICE,
    SLICE_PARTS,
    TOKEN_TILE,
    RoutingConfig,
)

M_TILE = 16  # experts of a product
M_TILES = EXPERT_TILE // M_TILE
CHUNK = 32  # elements of k that a quad loads at a time, of one row
CHUNKS = PART // CHUNK
WORDS = 4  # registers of a lane's vector
LANE_BYTES = 16


class GateTensors(NamedTuple):
    """Tensors of the gate."""

    x: cute.Tensor  # [T, D] bf16
    weight: cute.Tensor  # [E, D] bf16
    partials: cute.Tensor  # [splits, T, E] fp32, written
    codes: cute.Tensor  # [T, D] e4m3, written
    scales: cute.Tensor  # [T, D / 128] E8M0 bytes, written
    arrivals: cute.Tensor  # [2] int32, set to 0 for the launches that follow
    packed: PackedTokens | None = None  # x in NVFP4, written


class Gate:
    """Kernel: partial sums of the logits, and FP8 codes of x."""

    def __init__(self, config: RoutingConfig):
        self.config = config

    @cute.jit
    def launch(self, tensors: GateTensors, stream, token_tiles: Int32):
        """One CTA for each 32 experts, split, and `token_tiles` tiles of tokens."""
        splits, tokens, experts = tensors.partials.shape
        grid = [
            experts // EXPERT_TILE,
            splits,
            cute.ceil_div(tokens, TOKEN_TILE * token_tiles),
        ]
        self.kernel(tensors, token_tiles).launch(
            grid=grid, block=[GATE_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: GateTensors, token_tiles: Int32):
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        expert_tile, split, block = cute.arch.block_idx()
        # Two sets, by turns: warps may store their sums of a tile while others still add the last.
        shape = (2, EXPERT_TILE * TOKEN_TILE // 2, SLICE_PARTS, 2)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(shape, stride=ORDER), 16)
        slices = self.config.slices // tensors.partials.shape[0]
        first = split * slices
        first_token = block * token_tiles * TOKEN_TILE
        tiles = cute.ceil_div(tensors.x.shape[0] - first_token, TOKEN_TILE)
        tiles = cutlass.min(tiles, token_tiles)
        pdl.launch_dependents()
        weights = cute.make_rmem_tensor((WORDS, 2 * M_TILES, CHUNKS), Uint32)
        load_weights(tensors.weight, expert_tile, first, warp, weights)
        whole = Float32(0.0)
        if cutlass.const_expr(self.config.packs):
            whole = scale_of_tokens(tensors.packed.global_scales)
        pdl.wait_for_previous_launch()
        if expert_tile + split + block == 0 and cute.arch.thread_idx()[0] == 0:
            for word in cutlass.range_constexpr(ARRIVAL_WORDS):
                tensors.arrivals[word] = Int32(0)
            if cutlass.const_expr(self.config.packs):
                tensors.packed.whole[0] = whole
        totals = cute.make_rmem_tensor((2, MOST_TILES), Float32)
        totals.fill(0.0)
        # Those of a tile are on their way while the tile before is multiplied.
        words = cute.make_rmem_tensor((WORDS, CHUNKS, 2), Uint32)
        for s in cutlass.range(slices, unroll=1):
            k_block = (first + s) * SLICE_PARTS + warp
            load_activations(tensors.x, first_token, k_block, words[None, None, 0])
            if s > 0:
                load_weights(tensors.weight, expert_tile, first + s, warp, weights)
            for tile in cutlass.range_constexpr(MOST_TILES):
                if tile < tiles:
                    token = first_token + tile * TOKEN_TILE
                    if tile + 1 < tiles:
                        load_activations(
                            tensors.x, token + TOKEN_TILE, k_block, words[None, None, 1 - tile % 2]
                        )
                    # A CTA of each tile of experts has codes of some tiles of tokens.
                    writes_codes = expert_tile == tile % cute.arch.grid_dim()[0]
                    self.add_slice(
                        tensors, sums[None, None, None, (s * tiles + tile) % 2], weights,
                        words[None, None, tile % 2], totals[None, tile], token, k_block,
                        writes_codes, warp,
                    )  # fmt: skip
                    if cutlass.const_expr(self.config.packs):  # noqa: SIM102 static
                        if expert_tile == cute.arch.grid_dim()[0] - 1:
                            lane = cute.arch.lane_idx()
                            pack_tokens(
                                tensors.packed, words[None, None, tile % 2], token + lane // 4,
                                k_block, lane % 4, whole,
                            )  # fmt: skip
        for tile in cutlass.range_constexpr(MOST_TILES):
            if tile < tiles:
                token = first_token + tile * TOKEN_TILE
                thread = cute.arch.thread_idx()[0]
                store_totals(
                    tensors.partials, totals[None, tile], token, split, expert_tile, thread
                )

    @cute.jit
    def add_slice(
        self,
        tensors: GateTensors,
        sums: cute.Tensor,
        weights: cute.Tensor,
        words: cute.Tensor,
        total: cute.Tensor,
        first_token: Int32,
        k_block: Int32,
        writes_codes: Boolean,
        warp: Int32,
    ) -> None:
        """total += the sums of a slice, of this thread's expert and two tokens."""
        lane = cute.arch.lane_idx()
        store_sums(weights, words, sums[None, None, warp])
        if cutlass.const_expr(self.config.quantizes):  # noqa: SIM102 static
            if writes_codes:
                store_codes(tensors, words, first_token + lane // 4, k_block, lane % 4)
        cute.arch.sync_threads()
        thread = cute.arch.thread_idx()[0]
        for column in cutlass.range_constexpr(2):
            total[column] += added_parts(sums[column, thread, None])


PAIRS = EXPERT_TILE * TOKEN_TILE // 2  # of neighbouring tokens, of an expert: one for each thread
ORDER = (1, 2, 2 * PAIRS, 2 * PAIRS * SLICE_PARTS)


def products(weights: cute.Tensor, words: cute.Tensor, m: int) -> tuple:
    """A part's sums of 16 experts and 8 tokens: the fragment of this lane."""
    sums = (Float32(0.0),) * 4
    for c in range(CHUNKS):
        for step in (0, 2):
            a = [weights[step + high, 2 * m + half, c] for high in (0, 1) for half in (0, 1)]
            sums = mma_bf16(a, [words[step, c], words[step + 1, c]], sums)
    return sums


@cute.jit
def store_sums(weights: cute.Tensor, words: cute.Tensor, sums: cute.Tensor) -> None:
    """sums[column, pair] = a part's sums of 32 experts and 8 tokens."""
    for m in cutlass.range_constexpr(M_TILES):
        store_product(products(weights, words, m), m, sums)


@cute.jit
def store_product(found: tuple, m: Int32 | int, sums: cute.Tensor) -> None:
    """sums[column, pair] of product `m` of a tile's experts, from this lane's fragment."""
    lane = cute.arch.lane_idx()
    for half in cutlass.range_constexpr(2):
        row = m * M_TILE + half * 8 + lane // 4
        for column in cutlass.range_constexpr(2):
            sums[column, row * 4 + lane % 4] = found[2 * half + column]


def added_parts(sums: cute.Tensor) -> Float32:
    """Sum of a slice, of those of its parts in order."""
    total = sums[0]
    for part in range(1, SLICE_PARTS):
        total += sums[part]
    return total


def mma_bf16(a: list, b: list, c: tuple) -> tuple:
    """Fragment of a 16 x 8 product of bf16, k = 16, added to `c` in fp32."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


@cute.jit
def load_weights(
    weight: cute.Tensor, expert_tile: Int32, piece: Int32, warp: Int32, target: cute.Tensor
) -> None:
    """target[word, 8 rows, chunk] = this lane's elements of the warp's part of a slice."""
    load_rows(weight, expert_tile * EXPERT_TILE, piece * SLICE_PARTS + warp, target)


@cute.jit
def load_rows(weight: cute.Tensor, first: Int32, k_block: Int32, target: cute.Tensor) -> None:
    """target[word, 8 rows, chunk] = this lane's elements of a k block, of rows from `first` on."""
    lane = cute.arch.lane_idx()
    for rows in cutlass.range_constexpr(target.shape[1]):
        row = first + rows * 8 + lane // 4
        for c in cutlass.range_constexpr(CHUNKS):
            offset = k_block * PART + c * CHUNK + lane % 4 * 8
            load_vector(weight, row, offset, target[None, rows, c])


@cute.jit
def prefetch_weights(weight: cute.Tensor, expert_tile: Int32, piece: Int32, warp: Int32) -> None:
    """Ask for what `load_weights` loads to be brought into L2, a row a lane."""
    row = expert_tile * EXPERT_TILE + cute.arch.lane_idx()
    offset = Int64(row) * weight.stride[0] + piece * SLICE + warp * PART
    address = address_of(weight, offset)
    for line in cutlass.range_constexpr(PART * weight.element_type.width // 8 // LINE_BYTES):
        prefetch_l2(address + line * LINE_BYTES)


@cute.jit
def load_activations(x: cute.Tensor, first_token: Int32, k_block: Int32, target: cute.Tensor):
    """target[word, chunk] = this lane's elements of a k block of 8 tokens; zeros past the last."""
    lane = cute.arch.lane_idx()
    token = first_token + lane // 4
    target.fill(0)
    if token < x.shape[0]:
        for c in cutlass.range_constexpr(CHUNKS):
            load_vector(x, token, k_block * PART + c * CHUNK + lane % 4 * 8, target[None, c])


@cute.jit
def load_vector(source: cute.Tensor, row, column, target: cute.Tensor) -> None:
    """target[word] = 16 bytes of a row."""
    offset = Int64(row) * source.stride[0] + column
    pointer = pointer_at(source.iterator, offset, Uint32, align=LANE_BYTES)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), target)


@cute.jit
def store_totals(
    partials: cute.Tensor, total: cute.Tensor, first_token, split: Int32, expert_tile: Int32, pair
) -> None:
    """partials[split, token, expert] of a pair, an expert and two tokens."""
    expert = expert_tile * EXPERT_TILE + pair // 4
    for column in cutlass.range_constexpr(2):
        token = first_token + pair % 4 * 2 + column
        if token < partials.shape[1]:
            partials[split, token, expert] = total[column]


@cute.jit
def store_codes(tensors, words: cute.Tensor, token: Int32, k_block: Int32, place: Int32) -> None:
    """Write e4m3 codes and the E8M0 scale of 128 elements of a token, which a quad holds, to the
    `codes` and `scales` of a launch's tensors."""
    pairs = [words[i, c] for c in range(CHUNKS) for i in range(WORDS)]
    scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, lanes=4))
    for c in cutlass.range_constexpr(CHUNKS):
        codes = quant.quantize_e4m3(pairs[c * WORDS : (c + 1) * WORDS], scale)
        if token < tensors.codes.shape[0]:
            offset = Int64(token) * tensors.codes.stride[0] + k_block * PART + c * CHUNK + place * 8
            target = pointer_at(tensors.codes.iterator, offset, Uint32, align=8)
            source = cute.recast_tensor(codes, Uint32)
            cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(2)))
    if place == 0 and token < tensors.scales.shape[0]:
        tensors.scales[token, k_block] = Uint8(scale)
