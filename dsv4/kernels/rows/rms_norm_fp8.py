"""RMSNorm of bf16 rows with FP8 quantisation of its output, for sm_90a and sm_100a.

y = bf16(x / sqrt(mean(x^2) + eps) * weight), then e4m3 codes of y and one E8M0 scale per 128
elements. A CTA takes blocks of rows one after another. Rows on their way lie in shared memory, where
each thread waits for its own elements alone and reads them twice; warps exchange only one sum of
squares per group.

The sum of squares is a fixed binary tree, whatever the tiling: halves are added, first within the 8
elements of a vector, then among the 16 vectors of a group, then among the groups, padded with zeros
to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.math import RoundingMode
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.args import compile_kernel
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
        self.tiling = choose_tiling(config.dim) if tiling is None else tiling
        assert self.tiling.groups == config.groups

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, dim] bf16
        weight: cute.Tensor,  # [dim] fp32 or bf16, or [0]
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
        tiling = self.tiling
        thread = cute.arch.thread_idx()[0]
        slot, column = thread // tiling.row_threads, thread % tiling.row_threads
        team, lane = column // tiling.team, column % tiling.team
        tokens = x.shape[0]
        step = cute.arch.grid_dim()[0] * tiling.rows
        first = cute.arch.block_idx()[0] * tiling.rows
        smem = SmemAllocator()
        shape = (VECTOR, tiling.threads, tiling.vectors, tiling.rounds, tiling.stages)
        rows = smem.allocate_tensor(BFloat16, cute.make_layout(shape), byte_alignment=16)
        # Two sets: warps may begin with the next row while others still read the sums of this one.
        shape = (tiling.groups, tiling.rows, 2)
        sums = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)

        cute.arch.griddepcontrol_launch_dependents()
        # The weight is not an output of the launch before.
        gains = self.load_weight(weight, team, lane)
        cute.arch.griddepcontrol_wait()

        for stage in cutlass.range_constexpr(tiling.stages):
            row = first + slot + stage * step
            self.load_row(x, row, row < tokens, team, lane, rows[None, thread, None, None, stage])
        stage, turn = Int32(0), Int32(0)
        while first < tokens:
            row = first + slot
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
                self.normalize(own, gains, factor, (row, codes, scales, norm_out), team, lane)
            row += tiling.stages * step
            self.load_row(x, row, row < tokens, team, lane, own)
            first, turn = first + step, 1 - turn
            stage = cutlass.select_(stage == tiling.stages - 1, Int32(0), stage + 1)

    # ---- global memory ---------------------------------------------------------------------------

    def group_of(self, team: Int32, round: int) -> tuple[Int32, Boolean | bool]:
        """Group that a team holds in a round, and whether it is its own.

        A team without one computes the last group too, since its warp shuffles, and stores nothing.
        """
        group, last = team + round * self.tiling.teams, self.tiling.groups - 1
        if self.tiling.is_ragged and round == self.tiling.rounds - 1:
            return cutlass.min(group, last), group <= last
        return group, True

    def column(self, group: Int32, lane: Int32, vector: int) -> Int32:
        """First element of a vector of a lane."""
        return group * GROUP + (lane + vector * self.tiling.team) * VECTOR

    @cute.jit
    def load_row(self, x: cute.Tensor, row, is_row, team, lane, target: cute.Tensor) -> None:
        """Begin to load target[:, vector, round], this thread's elements of a row, as one group of
        asynchronous copies, which is empty past the last row."""
        for r in cutlass.range_constexpr(self.tiling.rounds):
            group, _ = self.group_of(team, r)
            if is_row:
                for v in cutlass.range_constexpr(self.tiling.vectors):
                    source = row_vector(x, row, self.column(group, lane, v))
                    cute.copy(copy_async(), source, target[None, v, r])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_weight(self, weight: cute.Tensor, team, lane) -> cute.Tensor:
        """[VECTOR, vector, round]: this thread's elements of the weight."""
        tiling = self.tiling
        gains = cute.make_rmem_tensor((VECTOR, tiling.vectors, tiling.rounds), weight.element_type)
        if cutlass.const_expr(self.config.weight_dtype is not None):
            for r in cutlass.range_constexpr(tiling.rounds):
                group, _ = self.group_of(team, r)
                for v in cutlass.range_constexpr(tiling.vectors):
                    source = vector_at(weight, self.column(group, lane, v))
                    cute.autovec_copy(source, gains[None, v, r])
        return gains

    # ---- first pass: sum of squares --------------------------------------------------------------

    @cute.jit
    def add_squares(self, own: cute.Tensor, sums: cute.Tensor, team, lane) -> None:
        """sums[group] = sum of squares of each group of this thread's team."""
        tiling = self.tiling
        for r in cutlass.range_constexpr(tiling.rounds):
            total = tree_sum([vector_squares(own[None, v, r]) for v in range(tiling.vectors)])
            total = cute.arch.warp_reduction_sum(total, threads_in_group=tiling.team)
            group, is_own = self.group_of(team, r)
            if lane == 0 and is_own:
                sums[group] = total

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
        mean = cute.math.div(total, Float32(self.config.dim), rounding=RoundingMode.NEAREST_EVEN)
        # Not rsqrt: the GPU has only an approximate one.
        root = cute.math.sqrt(mean + Float32(self.config.eps), rounding=RoundingMode.NEAREST_EVEN)
        return cute.math.rcp(root, rounding=RoundingMode.NEAREST_EVEN)

    # ---- second pass: normalise, quantise, store -------------------------------------------------

    @cute.jit
    def normalize(self, own, gains, factor: Float32, outputs, team, lane) -> None:
        """Write codes and scales of a row, and the normalised row where it is wanted."""
        row, codes, scales, norm_out = outputs
        tiling = self.tiling
        for r in cutlass.range_constexpr(tiling.rounds):
            group, is_own = self.group_of(team, r)
            words = []
            for v in cutlass.range_constexpr(tiling.vectors):
                words += normalized(own[None, v, r], gains[None, v, r], factor, self.has_weight)
            scale = quant.e8m0_scale_e4m3(quant.amax_bf16(words, tiling.team))
            reciprocal = quant.reciprocal_e8m0(scale)
            if is_own:
                for v in cutlass.range_constexpr(tiling.vectors):
                    column = self.column(group, lane, v)
                    part = words[v * PAIRS : (v + 1) * PAIRS]
                    values = [y * reciprocal for word in part for y in quant.unpack_bf16(word)]
                    cute.autovec_copy(quant.to_e4m3(values), row_vector(codes, row, column))
                    if row < norm_out.shape[0]:
                        target = cute.recast_tensor(row_vector(norm_out, row, column), Uint32)
                        cute.autovec_copy(in_registers(part), target)
                if lane == 0:
                    cute.recast_tensor(scales, cutlass.Uint8)[row, group] = cutlass.Uint8(scale)

    @property
    def has_weight(self) -> bool:
        return self.config.weight_dtype is not None


def tree_sum(values: Sequence[Float32]) -> Float32:
    """Sum of a power of two of values: the halves are added until one is left."""
    values = list(values)
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:])]
    return values[0]


def vector_squares(vector: cute.Tensor) -> Float32:
    """Sum of squares of a vector of bf16 in shared memory."""
    return tree_sum([quant.exact_square(x) for x in elements_of(vector)])


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


def in_registers(values: Sequence[Uint32]) -> cute.Tensor:
    """The values as a tensor."""
    tensor = cute.make_rmem_tensor(len(values), Uint32)
    for i, value in enumerate(values):
        tensor[i] = value
    return tensor


def row_vector(tensor: cute.Tensor, row, column) -> cute.Tensor:
    """VECTOR elements from tensor[row, column] on; the row may begin past 2^31 elements."""
    offset = Int64(row) * tensor.stride[0] + column
    return aligned_vector(tensor, offset)


def vector_at(tensor: cute.Tensor, column) -> cute.Tensor:
    """VECTOR elements from tensor[column] on."""
    return aligned_vector(tensor, Int64(column))


def aligned_vector(tensor: cute.Tensor, offset: Int64) -> cute.Tensor:
    pointer = cute.make_ptr(
        tensor.element_type,
        (tensor.iterator + offset).toint(),
        cute.AddressSpace.gmem,
        assumed_align=min(16, VECTOR * tensor.element_type.width // 8),
    )
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


def build(config: RmsNormFp8Config, options: str = "", tiling: RowTiling | None = None):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(RmsNormFp8(config, tiling), ARGS, values(config), options)
