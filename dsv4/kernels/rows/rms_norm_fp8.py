"""RMSNorm of bf16 rows with FP8 quantisation of its output, for sm_90a and sm_100a.

y = bf16(x / sqrt(mean(x^2) + eps) * weight), then e4m3 codes of y and one E8M0 scale per 128
elements. A CTA takes blocks of rows one after another. Rows on their way lie in shared memory,
where each thread waits for its own elements alone and reads them twice; warps exchange only one sum
of squares per group.

The sum of squares is a fixed binary tree, whatever the tiling: halves are added, first within the 8
elements of a vector, then among the 16 vectors of a group, then among the groups, padded with zeros
to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.rms import NEAREST, inverse_rms
from dsv4.kernels.kit.vectors import address_of, in_registers, pointer_to, vector_at
from dsv4.kernels.rows.args import ARGS, values
from dsv4.kernels.rows.config import GROUP, VECTOR, WARP, RmsNormFp8Config, RowTiling, choose_tiling

PAIRS = VECTOR // 2  # registers of a vector


class RmsNormFp8:
    """Kernel of one configuration.

    Args:
        config: what it computes.
        tiling: default the one that `choose_tiling` takes for these rows.
    """

    def __init__(self, config: RmsNormFp8Config, tiling: RowTiling | None = None):
        self.config = config
        self.has_weight = config.weight_dtype is not None
        self.tiling = choose_tiling(config.dim) if tiling is None else tiling
        assert self.tiling.groups == config.groups

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, dim] bf16
        weight: cute.Tensor,  # [dim] fp32 or bf16; any size where there is none
        codes: cute.Tensor,  # [T, dim] e4m3, written
        scales: cute.Tensor,  # [T, dim / 128] e8m0, written
        stream,
        *,
        norm_out: cute.Tensor,  # [T, dim] bf16, written, or [0, dim]: not wanted
        num_ctas: Int32,  # at most; more rows are taken in turns
    ):
        tiling = self.tiling
        blocks = cute.ceil_div(x.shape[0], tiling.rows)
        self.kernel(x, weight, codes, scales, norm_out).launch(
            grid=[cutlass.min(blocks, num_ctas), 1, 1],
            block=[tiling.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=tiling.ctas_per_sm,
            preferred_smem_carveout=tiling.carveout,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        norm_out: cute.Tensor,
    ):
        smem = self.allocate(SmemAllocator())
        cute.arch.griddepcontrol_launch_dependents()
        operands = x, weight, codes, scales, norm_out
        self.run(operands, smem, cute.arch.block_idx()[0], cute.arch.grid_dim()[0])

    def allocate(self, smem: SmemAllocator) -> tuple[cute.Tensor, cute.Tensor]:
        """Rows on their way, and sums of squares of their groups."""
        tiling = self.tiling
        shape = (VECTOR, tiling.threads, tiling.vectors, tiling.rounds, tiling.stages)
        rows = smem.allocate_tensor(BFloat16, cute.make_layout(shape), byte_alignment=16)
        # Two sets: warps may begin with the next row while others still read the sums of this one.
        shape = (tiling.groups, tiling.rows, 2)
        return rows, smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)

    @cute.jit
    def run(self, operands: tuple, smem: tuple, block: Int32, blocks: Int32):
        """Take the rows of one of `blocks` CTAs."""
        x, weight, codes, scales, norm_out = operands
        rows, sums = smem
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        slot, place = thread // tiling.row_threads, thread % tiling.row_threads
        team, lane = place // tiling.team, place % tiling.team
        column = team * GROUP + lane * VECTOR
        tokens = x.shape[0]
        step = blocks * tiling.rows
        row = block * tiling.rows + slot
        # The weight is not an output of the launch before.
        gains_at = address_of(weight, Int64(column))
        held = ()
        if cutlass.const_expr(tiling.holds_weight):
            held = self.load_weight(weight, gains_at, team)
        cute.arch.griddepcontrol_wait()

        # Addresses advance by a constant from row to row: products of 64 bits are expensive.
        ahead, ahead_step = row_cursor(x, row, column, step)
        codes_at, codes_step = row_cursor(codes, row, column, step)
        scales_at, scales_step = row_cursor(scales, row, team, step)
        norm_at, norm_step = row_cursor(norm_out, row, column, step)
        for stage in cutlass.range_constexpr(tiling.stages):
            own = rows[None, thread, None, None, stage]
            self.load_row(ahead, row + stage * step < tokens, team, own)
            ahead += ahead_step
        stage, turn = Int32(0), Int32(0)
        # The rows of a CTA end together, since its warps meet at a barrier.
        while row - slot < tokens:
            own = rows[None, thread, None, None, stage]
            cute.arch.cp_async_wait_group(tiling.stages - 1)
            if row < tokens:
                self.add_squares(own, sums[None, slot, turn], team, lane)
            if cutlass.const_expr(tiling.threads == WARP):
                cute.arch.sync_warp()
            else:
                cute.arch.sync_threads()
            if row < tokens:
                factor = self.inverse_rms(sums[None, slot, turn])
                targets = (codes_at, scales_at, norm_at)
                gains = (weight, gains_at, held)
                self.normalize(own, gains, factor, targets, row < norm_out.shape[0], team, lane)
            self.load_row(ahead, row + tiling.stages * step < tokens, team, own)
            row, turn = row + step, 1 - turn
            stage = cutlass.select_(stage == tiling.stages - 1, Int32(0), stage + 1)
            ahead, codes_at = ahead + ahead_step, codes_at + codes_step
            scales_at, norm_at = scales_at + scales_step, norm_at + norm_step

    # ---- global memory ---------------------------------------------------------------------------

    def round_of(self, team: Int32, r: int) -> tuple[int | Int32, Boolean | bool]:
        """Groups between a team's first one and that of a round, and whether that is its own.

        A team without a group in the last round computes the last group too, since its warp
        shuffles, and stores nothing.
        """
        tiling = self.tiling
        skip, last = r * tiling.teams, tiling.groups - 1
        if tiling.is_ragged and r == tiling.rounds - 1:
            return cutlass.min(team + skip, last) - team, team + skip <= last
        return skip, True

    def element(self, skip: int | Int32, vector: int) -> int | Int32:
        """Elements between a thread's first one and a vector of the group that is `skip` on."""
        return skip * GROUP + vector * self.tiling.team * VECTOR

    @cute.jit
    def load_row(self, address: Int64, is_row: Boolean, team: Int32, target: cute.Tensor) -> None:
        """Begin to load target[:, vector, round], this thread's elements of a row, as one group of
        asynchronous copies, which is empty past the last row."""
        if is_row:
            for r in cutlass.range_constexpr(self.tiling.rounds):
                skip, _ = self.round_of(team, r)
                for v in cutlass.range_constexpr(self.tiling.vectors):
                    source = vector_at(address, BFloat16, self.element(skip, v))
                    cute.copy(copy_async(), source, target[None, v, r])
        cute.arch.cp_async_commit_group()

    def load_weight(self, weight: cute.Tensor, address: Int64, team: Int32) -> tuple:
        """This thread's elements of the weight, a tensor [VECTOR, vector] for each round."""
        rounds = range(self.tiling.rounds)
        return tuple(self.load_gains(weight, address, team, r) for r in rounds)

    def load_gains(self, weight: cute.Tensor, address: Int64, team: Int32, r: int) -> cute.Tensor:
        """[VECTOR, vector]: this thread's elements of the weight in a round; not loaded if none."""
        dtype, vectors = weight.element_type, self.tiling.vectors
        gains = cute.make_rmem_tensor((VECTOR, vectors), dtype)
        skip, _ = self.round_of(team, r)
        for v in range(vectors if self.has_weight else 0):
            source = vector_at(address, dtype, self.element(skip, v))
            cute.autovec_copy(source, gains[None, v])
        return gains

    # ---- first pass: sum of squares --------------------------------------------------------------

    @cute.jit
    def add_squares(self, own: cute.Tensor, sums: cute.Tensor, team: Int32, lane: Int32) -> None:
        """sums[group] = sum of squares of each group of this thread's team."""
        tiling = self.tiling
        for r in cutlass.range_constexpr(tiling.rounds):
            total = tree_sum([vector_squares(own[None, v, r]) for v in range(tiling.vectors)])
            total = cute.arch.warp_reduction_sum(total, threads_in_group=tiling.team)
            skip, is_own = self.round_of(team, r)
            if lane == 0 and is_own:
                sums[team + skip] = total

    def inverse_rms(self, sums: cute.Tensor) -> Float32:
        """1 / sqrt(mean + eps) of a row, from the sums of its groups; the same in every lane."""
        groups, padded = self.tiling.groups, self.tiling.sums
        width = min(padded, WARP)
        found = []
        for start in range(0, padded, width):
            group = start + cute.arch.lane_idx() % width
            value = sums[cutlass.min(group, groups - 1)]
            if start + width > groups:
                value = cutlass.select_(group < groups, value, Float32(0.0))
            found.append(value)
        total = cute.arch.warp_reduction_sum(tree_sum(found), threads_in_group=width)
        return inverse_rms(total, self.config.dim, self.config.eps)

    # ---- second pass: normalise, quantise, store -------------------------------------------------

    @cute.jit
    def normalize(
        self,
        own: cute.Tensor,
        gains,
        factor: Float32,
        targets,
        wants_norm,
        team: Int32,
        lane: Int32,
    ) -> None:
        """Write codes and scales of a row, and the normalised row where it is wanted."""
        weight, gains_at, held = gains
        codes_at, scales_at, norm_at = targets
        tiling = self.tiling
        for r in cutlass.range_constexpr(tiling.rounds):
            skip, is_own = self.round_of(team, r)
            if cutlass.const_expr(tiling.holds_weight):
                mine = held[r]
            else:
                mine = self.load_gains(weight, gains_at, team, r)
            pairs = []
            for v in cutlass.range_constexpr(tiling.vectors):
                pairs += normalized(own[None, v, r], mine[None, v], factor, self.has_weight)
            scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, tiling.team))
            codes = [
                quant.quantize_e4m3(pairs[v * PAIRS : (v + 1) * PAIRS], scale)
                for v in range(tiling.vectors)
            ]
            if is_own:
                for v in cutlass.range_constexpr(tiling.vectors):
                    cute.autovec_copy(
                        codes[v], vector_at(codes_at, codes[v].element_type, self.element(skip, v))
                    )
                if lane == 0:
                    pointer_to(scales_at + skip, Uint8, 1).store(Uint8(scale))
                if wants_norm:
                    for v in cutlass.range_constexpr(tiling.vectors):
                        target = vector_at(norm_at, BFloat16, self.element(skip, v))
                        part = in_registers(pairs[v * PAIRS : (v + 1) * PAIRS])
                        cute.autovec_copy(part, cute.recast_tensor(target, Uint32))


def tree_sum(terms: Sequence[Float32]) -> Float32:
    """Sum of a power of two of terms: the halves are added until one is left."""
    terms = list(terms)
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:])]
    return terms[0]


def vector_squares(vector: cute.Tensor) -> Float32:
    """Sum of squares of a vector of bf16 in shared memory."""
    # Rounded by itself: a plain product may be contracted with the addition that follows.
    return tree_sum([cute.math.mul(x, x, rounding=NEAREST) for x in elements_of(vector)])


def normalized(vector: cute.Tensor, gains: cute.Tensor, factor: Float32, has_weight: bool) -> list:
    """x * factor [* weight] of a vector in shared memory, rounded to bf16 pairs."""
    elements = [x * factor for x in elements_of(vector)]
    if has_weight:
        elements = [x * Float32(gains[i]) for i, x in enumerate(elements)]
    return [quant.pack_bf16(*elements[i : i + 2]) for i in range(0, VECTOR, 2)]


def elements_of(vector: cute.Tensor) -> list[Float32]:
    """A vector of bf16 in fp32."""
    pairs = cute.make_rmem_tensor(PAIRS, Uint32)
    cute.autovec_copy(cute.recast_tensor(vector, Uint32), pairs)
    return [x for i in range(PAIRS) for x in quant.unpack_bf16(pairs[i])]


def copy_async() -> cute.CopyAtom:
    """Asynchronous copy of a vector to shared memory, past L1."""
    operation = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
    return cute.make_copy_atom(operation, BFloat16, num_bits_per_copy=128)


# ---- addresses -----------------------------------------------------------------------------------


def row_cursor(tensor: cute.Tensor, row: Int32, column: Int32, step: Int32) -> tuple[Int64, Int64]:
    """Address of tensor[row, column], and the bytes between there and `step` rows on.

    Rows may begin past 2^31 elements.
    """
    size = tensor.element_type.width // 8
    address = address_of(tensor, Int64(row) * tensor.stride[0] + column)
    return address, Int64(step) * tensor.stride[0] * size


def build(config: RmsNormFp8Config, options: str = "", tiling: RowTiling | None = None):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(RmsNormFp8(config, tiling), ARGS, values(config), options)
