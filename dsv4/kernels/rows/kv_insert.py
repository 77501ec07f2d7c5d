"""Insertion of latents into a paged cache, for sm_90a and sm_100a: norm, rotation, FP8, store.

y = bf16(x / sqrt(mean(x^2) + eps) * weight), its last 64 channels rotated by the latent's position
and rounded again, the others rounded to e4m3 with a power-of-two scale per 64; written as an FP8
entry (`kit.kv_entry`), or as the bf16 row that the entry decodes to. A warp takes one latent, or
several short ones; nothing is exchanged between warps.

The sum of squares is the binary tree of `rms_norm_fp8`.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, cute

from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.kv_entry import GROUP, ROPE_DIM, Fp8Entry
from dsv4.kernels.kit.rms import NEAREST, inverse_rms
from dsv4.kernels.kit.vectors import address_of, in_registers, pointer_to, vector_at
from dsv4.kernels.rows.config import VECTOR, WARP
from dsv4.kernels.rows.kv_insert_config import ARGS, KvInsertConfig, values
from dsv4.kernels.rows.rms_norm_fp8 import PAIRS, normalized, tree_sum, vector_squares

HEAD_DIMS = (64, 128, 512)
WARPS = 4  # of a CTA
CTAS_PER_SM = 8
TEAM = GROUP // VECTOR  # lanes of a group of codes
SUM_LANES = 128 // VECTOR  # lanes of a group of `rms_norm_fp8`


class KvInsert:
    """Kernel of one configuration.

    A lane holds `vectors` vectors of 8 channels of a latent, every `lanes` vectors one, so that 8
    neighbouring lanes hold a group of codes.

    Args:
        config: what it computes.
        warps: of a CTA.
    """

    def __init__(self, config: KvInsertConfig, warps: int = WARPS):
        if config.dim not in HEAD_DIMS or config.rope_dim != ROPE_DIM:
            raise ValueError(
                f"dim, rope_dim: got {config.dim}, {config.rope_dim}; the kernel needs one of "
                f"{HEAD_DIMS}, {ROPE_DIM}"
            )
        if config.kv_format == "fp32":
            raise ValueError("kv_format: got 'fp32', the kernel needs 'bf16' or 'fp8'")
        self.config = config
        self.entry = Fp8Entry(config.dim)
        self.lanes = min(WARP, config.dim // VECTOR)
        self.vectors = config.dim // VECTOR // self.lanes
        self.threads = warps * WARP
        self.rows = self.threads // self.lanes

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [N, d] bf16
        weight: cute.Tensor,  # [d] fp32
        rope: cute.Tensor,  # [R, 64] fp32
        positions: cute.Tensor,  # [N] int32
        slots: cute.Tensor,  # [N] int32
        pool: cute.Tensor,  # [pages, P, row] bf16 or uint8, written
        stream,
        *,
        num_ctas: Int32,  # at most; more latents are taken in turns
    ):
        blocks = cute.ceil_div(x.shape[0], self.rows)
        self.kernel(x, weight, rope, positions, slots, pool).launch(
            grid=[cutlass.max(cutlass.min(blocks, num_ctas), 1), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        rope: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        pool: cute.Tensor,
    ):
        pdl.launch_dependents()
        operands = x, weight, rope, positions, slots, pool
        self.run(operands, cute.arch.block_idx()[0], cute.arch.grid_dim()[0])

    @cute.jit
    def run(self, operands: tuple, block: Int32, blocks: Int32):
        """Write the latents of one of `blocks` CTAs."""
        x, weight, rope, positions, slots, pool = operands
        thread = cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        row = block * self.rows + thread // self.lanes
        step = blocks * self.rows
        count = x.shape[0]
        # Lanes of a warp stay together, since they shuffle: those past the end redo the last latent
        # and store nothing.
        first = row - thread % WARP // self.lanes
        # The weight is not an output of the launch before, nor are places and rotations.
        gains = self.load_gains(weight, lane)
        slot = Int32(-1)
        turns = [cute.make_rmem_tensor(PAIRS, Float32) for _ in range(2)]
        if first < count:
            own = cutlass.min(row, count - 1)
            slot = slots[own]
            self.load_turns(turns, rope, positions[own], lane)
        pdl.wait_for_previous_launch()
        while first < count:
            own = cutlass.min(row, count - 1)
            is_slot = row < count and slot >= 0
            page = Int32(0)
            if is_slot:
                page = slot // pool.shape[1]
                is_slot = page < pool.shape[0]
            pairs = self.normalize(x, own, gains, lane)
            self.rotate(pairs, turns, lane)
            scales = self.scales(pairs, lane)
            if is_slot:
                place = slot - page * pool.shape[1]
                if cutlass.const_expr(self.config.kv_format == "fp8"):
                    self.store_entry(pairs, scales, pool, page, place, lane)
                else:
                    self.store_row(pairs, scales, pool, page, place, lane)
            row, first = row + step, first + step
            if first < count:
                own = cutlass.min(row, count - 1)
                slot = slots[own]
                self.load_turns(turns, rope, positions[own], lane)

    def channel(self, lane: Int32, v: int) -> Int32:
        """First channel of a lane's vector."""
        return (lane + v * self.lanes) * VECTOR

    def is_rotated(self, lane: Int32, v: int) -> Boolean | bool:
        """Whether a vector lies among the rotated channels, the last group of all."""
        if v < self.vectors - 1:
            return False
        return lane >= self.lanes - TEAM

    def load_gains(self, weight: cute.Tensor, lane: Int32) -> list[cute.Tensor]:
        """This lane's elements of the weight, by vector."""
        found = []
        for v in range(self.vectors):
            gains = cute.make_rmem_tensor(VECTOR, Float32)
            address = address_of(weight, Int64(self.channel(lane, v)))
            cute.autovec_copy(vector_at(address, Float32, 0), gains)
            found.append(gains)
        return found

    def normalize(
        self, x: cute.Tensor, row: Int32, gains: list[cute.Tensor], lane: Int32
    ) -> list[list[Uint32]]:
        """Pairs of bf16 of the normalised latent, by vector."""
        vectors, sums = [], []
        for v in range(self.vectors):
            vector = cute.make_rmem_tensor(VECTOR, BFloat16)
            address = address_of(x, Int64(row) * x.stride[0] + self.channel(lane, v))
            cute.autovec_copy(vector_at(address, BFloat16, 0), vector)
            vectors.append(vector)
            width = min(SUM_LANES, self.lanes)
            squares = vector_squares(vector)
            sums.append(cute.arch.warp_reduction_sum(squares, threads_in_group=width))
        total = tree_sum(sums)
        if self.lanes > SUM_LANES:
            total = total + cute.arch.shuffle_sync_bfly(total, offset=SUM_LANES)
        factor = inverse_rms(total, self.config.dim, self.config.eps)
        return [normalized(vectors[v], gains[v], factor, True) for v in range(self.vectors)]

    def load_turns(
        self, turns: list[cute.Tensor], rope: cute.Tensor, position: Int32, lane: Int32
    ) -> None:
        """Cosines and sines of a position, of the lane's pairs among the rotated channels; lanes of
        plain ones load some, too."""
        position = cutlass.max(cutlass.min(position, rope.shape[0] - 1), 0)
        column = lane % TEAM * PAIRS
        for part, found in zip((0, ROPE_DIM // 2), turns):
            address = address_of(rope, Int64(position) * rope.stride[0] + part + column)
            pointer = pointer_to(address, Float32, 16)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(PAIRS)), found)

    def rotate(self, pairs: list[list[Uint32]], turns: list[cute.Tensor], lane: Int32) -> None:
        """Turn the pairs of the rotated channels, in place."""
        last = self.vectors - 1
        is_rotated = self.is_rotated(lane, last)
        cos, sin = turns
        # Lanes of plain channels keep what they have.
        for i in range(PAIRS):
            even, odd = quant.unpack_bf16(pairs[last][i])
            turned = quant.pack_bf16(
                rounded_product(even, cos[i]) - rounded_product(odd, sin[i]),
                rounded_product(even, sin[i]) + rounded_product(odd, cos[i]),
            )
            pairs[last][i] = cutlass.select_(is_rotated, turned, pairs[last][i])

    def scales(self, pairs: list[list[Uint32]], lane: Int32) -> list[Int32]:
        """E8M0 byte of the group of each vector; of rotated channels any."""
        config = self.config
        if not config.quantizes or self.entry.groups == 0:
            return []
        tops = [quant.amax_bf16(vector, TEAM) for vector in pairs]
        if config.uniform_scale:
            last = self.vectors - 1
            tops[last] = cutlass.select_(self.is_rotated(lane, last), Float32(0.0), tops[last])
            largest = tops[0]
            for top in tops[1:]:
                largest = cute.arch.fmax(largest, top, nan=True)
            offset = TEAM
            while offset < self.lanes:
                other = cute.arch.shuffle_sync_bfly(largest, offset=offset)
                largest = cute.arch.fmax(largest, other, nan=True)
                offset *= 2
            tops = [largest] * self.vectors
        return [quant.e8m0_scale_e4m3(top) for top in tops]

    @cute.jit
    def store_entry(
        self,
        pairs: list[list[Uint32]],
        scales: list[Int32],
        pool: cute.Tensor,
        page: Int32,
        place: Int32,
        lane: Int32,
    ):
        """Write an FP8 entry."""
        entry = self.entry
        start = address_of(pool, Int64(page) * pool.stride[0])
        record = start + place * entry.record_bytes
        scale_at = start + pool.shape[1] * entry.record_bytes + place * entry.scale_bytes
        for v in cutlass.range_constexpr(self.vectors):
            channel = self.channel(lane, v)
            if self.is_rotated(lane, v):
                target = vector_at(record + 2 * channel - entry.codes, BFloat16, 0)
                cute.autovec_copy(in_registers(pairs[v]), cute.recast_tensor(target, Uint32))
                if lane % TEAM == 0:
                    for i in cutlass.range_constexpr(entry.groups, entry.scale_bytes):
                        pointer_to(scale_at + i, Uint8, 1).store(Uint8(0))
            elif cutlass.const_expr(entry.groups > 0):
                codes = quant.quantize_e4m3(pairs[v], scales[v])
                cute.autovec_copy(codes, vector_at(record + channel, Float8E4M3FN, 0))
                if lane % TEAM == 0:
                    pointer_to(scale_at + channel // GROUP, Uint8, 1).store(Uint8(scales[v]))

    @cute.jit
    def store_row(
        self,
        pairs: list[list[Uint32]],
        scales: list[Int32],
        pool: cute.Tensor,
        page: Int32,
        place: Int32,
        lane: Int32,
    ):
        """Write a row of bf16, rounded to what an entry would hold where that is asked for."""
        offset = Int64(page) * pool.stride[0] + Int64(place) * pool.stride[1]
        for v in cutlass.range_constexpr(self.vectors):
            target = vector_at(address_of(pool, offset + self.channel(lane, v)), BFloat16, 0)
            words = pairs[v]
            if cutlass.const_expr(self.config.is_rounded and self.entry.groups > 0):
                words = rounded_to_e4m3(pairs[v], scales[v])
                if cutlass.const_expr(v == self.vectors - 1):
                    is_rotated = self.is_rotated(lane, v)
                    words = [cutlass.select_(is_rotated, a, b) for a, b in zip(pairs[v], words)]
            cute.autovec_copy(in_registers(words), cute.recast_tensor(target, Uint32))


def rounded_product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: a plain product may be contracted with the sum that follows."""
    return cute.math.mul(a, b, rounding=NEAREST)


def rounded_to_e4m3(pairs: list[Uint32], scale: Int32) -> list[Uint32]:
    """Pairs of bf16 of the codes times their scale, which is exact."""
    codes = quant.quantize_e4m3(pairs, scale)
    wide = codes.load().to(Float32)
    factor = quant.unpack_e8m0(scale)
    values_ = [wide[i] * factor for i in range(VECTOR)]
    return [quant.pack_bf16(values_[i], values_[i + 1]) for i in range(0, VECTOR, 2)]


def build(config: KvInsertConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(KvInsert(config), ARGS, values(config), options)
