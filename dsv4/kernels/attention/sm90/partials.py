"""Partial rows in 16 bits: accumulators of a split on their way through the workspace.

A row of an accumulator sub-tile is stored as fp16 times a power of two. That is 1 where the values
lie well within the range of fp16; if not, the row's largest finite value is brought just below the
top of it. Either way an element loses at most 2^-11 of itself, or 2^-15 of the row's largest,
whatever the magnitudes; the rounding of the output to bf16 takes up to 2^-8. Infinities and NaN
remain what they are, and leave the other elements alone.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.reduce import quad_max, tree
from dsv4.kernels.kit.wgmma import by_row, scale_rows

# Sums of the magnitudes of a thread's part of a row, between which the scale is 1: none of up to 32
# values then exceeds the largest fp16, and one at least is far above the smallest normal one.
LEAST, MOST = 2.0**-5, 65504.0
EXPONENT_BIAS = 127
TOP_EXPONENT = 14  # of the largest value, where it is scaled


@cute.jit
def store_subtile(
    subtile: cute.Tensor,
    start: cute.Pointer,
    step,
    scales: cute.Tensor,
    row_step: cutlass.Constexpr = 0,
):
    """Store an accumulator sub-tile by 16-column fragments in fp16, 16 bytes a thread; all 32
    lanes call this.

    Args:
        subtile: [4, 8-column group] fp32 of this thread; may be changed.
        start: of this thread's part of the first fragment.
        step: fp32 words from a fragment to the next.
        scales: [2], what the stored values of the thread's two rows must be multiplied by.
        row_step: fp32 words from its first row to its second one, 8 bytes each; 0: they are one.
    """
    _store(subtile, start, step, row_step)
    scales.fill(1.0)
    rows = by_row(subtile)
    is_fit = cutlass.Boolean(True)
    for r in cutlass.range_constexpr(2):
        sum = _tree_sum(_magnitudes(rows, r))
        is_fit = is_fit and sum >= LEAST and sum <= MOST
    if not cute.arch.vote_all_sync(is_fit):
        factors = cute.make_rmem_tensor(2, cutlass.Float32)
        for r in cutlass.range_constexpr(2):
            _scale_of(_magnitudes(rows, r), scales, factors, r)
        scale_rows(subtile, factors)
        _store(subtile, start, step, row_step)


def _magnitudes(rows: cute.Tensor, r: int):
    return [
        cute.math.absf(rows[r, c, g]) for g in range(cute.size(rows, mode=[2])) for c in range(2)
    ]


def _tree_sum(values):
    return tree(lambda a, b: a + b, values)


@cute.jit
def _store(subtile: cute.Tensor, start: cute.Pointer, step, row_step: cutlass.Constexpr):
    for fragment in cutlass.range_constexpr(cute.size(subtile) // 8):
        values = cute.make_rmem_tensor(8, cutlass.Float16)
        source = cute.make_tensor(subtile.iterator + fragment * 8, cute.make_layout(8))
        values.store(source.load().to(cutlass.Float16))
        target = pointer_at(start, fragment * step, cutlass.Float16)
        if cutlass.const_expr(row_step == 0):
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(8)))
        else:
            words = cute.recast_tensor(values, cutlass.Int32)
            for r in cutlass.range_constexpr(2):
                row = cute.make_rmem_tensor(2, cutlass.Int32)
                row[0], row[1] = words[r], words[r + 2]
                place = pointer_at(start, fragment * step + r * row_step, cutlass.Int32, 8)
                cute.autovec_copy(row, cute.make_tensor(place, cute.make_layout(2)))


@cute.jit
def _scale_of(magnitudes, scales: cute.Tensor, factors: cute.Tensor, r: cutlass.Constexpr):
    """The power of two of a row, and its inverse, from the largest finite value of the quad."""
    largest = cute.make_rmem_tensor(1, cutlass.Float32)
    infinity = cutlass.Float32.inf
    finite = [cutlass.select_(x < infinity, x, cutlass.Float32(0.0)) for x in magnitudes]
    largest[0] = quad_max(tree(cute.arch.fmax, finite))
    exponent = cute.recast_tensor(largest, cutlass.Int32)[0] >> 23
    # Neither power may leave the normal numbers.
    exponent = cutlass.max(exponent, TOP_EXPONENT + 1)
    words = cute.recast_tensor(scales, cutlass.Int32)
    words[r] = (exponent - TOP_EXPONENT) << 23
    words = cute.recast_tensor(factors, cutlass.Int32)
    words[r] = (2 * EXPONENT_BIAS + TOP_EXPONENT - exponent) << 23
