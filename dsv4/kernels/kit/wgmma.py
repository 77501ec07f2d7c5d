"""wgmma of one warpgroup: MMA makers, products over K steps, accumulator fragments by row."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma


def make_mma(
    dtype,
    tile,
    b_major: OperandMajorMode,
    is_a_in_registers: bool = False,
    a_major: OperandMajorMode = OperandMajorMode.K,
):
    """wgmma of one warpgroup with fp32 accumulators; tile: M, N."""
    source = warpgroup.OperandSource
    a_source = source.RMEM if is_a_in_registers else source.SMEM
    warpgroups = (1, 1, 1)
    return make_trivial_tiled_mma(
        dtype, dtype, a_major, b_major, cutlass.Float32, warpgroups, tile, a_source
    )


def gemm(mma_of, acc, a, b, steps, first_step_of_a: int, accumulate):
    """Issue acc (+)= a @ b over the given 16-wide K steps; the caller fences, commits and waits.

    The MMA is made here: setting ACCUMULATE changes the object, and a change inside a staged loop
    must not be seen outside it.
    """
    tiled_mma = mma_of()
    for step in steps:
        tiled_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, accumulate)
        a_step = a[None, None, step - first_step_of_a]
        cute.gemm(tiled_mma, acc, a_step, b[None, None, step], acc)
        accumulate = True


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """An m64nN accumulator fragment as [row of the thread (2), column of a pair (2), N / 8]."""
    return cute.make_tensor(
        acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4), stride=(2, 1, 4))
    )


def a_steps(operand: cute.Tensor) -> cute.Tensor:
    """An A operand in registers as [8, K step].

    A thread holds 16 columns of an accumulator at the very places where the A operand of another
    product takes them: from an accumulator to an operand nothing is rearranged.
    """
    return cute.make_tensor(operand.iterator, cute.make_layout((8, cute.size(operand) // 8)))


@cute.jit
def scale_rows(acc: cute.Tensor, factors):
    """Multiply the two rows of an accumulator fragment."""
    rows = by_row(acc)
    for j in cutlass.range_constexpr(cute.size(rows, mode=[2])):
        for c in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                rows[r, c, j] *= factors[r]
