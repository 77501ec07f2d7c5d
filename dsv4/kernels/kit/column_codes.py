"""e4m3 codes of columns whose rows the threads of a warpgroup have, one each, with a scale for each
column."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, cute, pipeline

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.reduce import tree

WARP, WARPS = 32, 4
LEAST_CODES = 8  # that are converted together
_MAGNITUDE = 0x7FFFFFFF


@cute.jit
def column_maxima(values, board: cute.Pointer, step: cutlass.Constexpr, barrier: cutlass.Constexpr):
    """Bits of the largest magnitude of each column among all rows; a NaN wins.

    Args:
        values: fp32 of the thread's row, of each column.
        board: int32 [warp, column] in shared memory, `step` apart: one of two by turns. A warp that
            writes the one after the next has read this one.
        barrier: hardware barrier of the warpgroup.
    """
    columns, thread = len(values), cute.arch.thread_idx()[0]
    own = cute.make_rmem_tensor(columns, Int32)
    for i in cutlass.range_constexpr(columns):
        bits = values[i].bitcast(Int32) & _MAGNITUDE
        own[i] = cute.arch.warp_redux_sync(bits, "max")
    if thread % WARP == 0:
        target = board + cute.assume(thread // WARP * step, divby=step)
        cute.autovec_copy(own, cute.make_tensor(target, cute.make_layout(columns)))
    pipeline.NamedBarrier(barrier, WARPS * WARP).arrive_and_wait()
    shape = (columns, WARPS)
    found = cute.make_rmem_tensor(shape, Int32)
    of_warps = cute.make_tensor(board, cute.make_layout(shape, stride=(1, step)))
    cute.autovec_copy(of_warps, found)
    return [tree(cutlass.max, [found[i, warp] for warp in range(WARPS)]) for i in range(columns)]


@cute.jit
def column_codes(values, maxima) -> tuple[cute.Tensor, Sequence[Int32]]:
    """Codes of the thread's row, as bytes, and the E8M0 byte of each column.

    Args:
        values: fp32 that were rounded to bf16.
        maxima: of `column_maxima`.
    """
    columns = len(values)
    scales = [quant.e8m0_scale_e4m3(bits.bitcast(Float32)) for bits in maxima]
    count = -(-columns // LEAST_CODES) * LEAST_CODES
    wide = cute.make_rmem_tensor(count, Float32)
    wide.fill(0.0)
    for i in cutlass.range_constexpr(columns):
        # The quotient is exact, or so small that its code is 0; scales of bf16 values lie far
        # below 254, and that of NaN is divided by as if it were infinite.
        reciprocal = cutlass.max(254 - scales[i], Int32(0)) << quant.FP32_MANTISSA
        wide[i] = values[i] * Int32(reciprocal).bitcast(Float32)
    codes = cute.make_rmem_tensor(count, Float8E4M3FN)
    codes.store(wide.load().to(Float8E4M3FN))
    return cute.recast_tensor(codes, Uint8), scales
