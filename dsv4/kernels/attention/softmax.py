"""Online softmax over a per-thread accumulator fragment. Nothing here depends on the architecture.

A thread holds two rows of a tile of scores, and a quad of lanes holds a row together: the fragment
of wgmma and of the 16x256b TMEM load. `scores[row, i]` is row `row` of the two; the running state
is one `maximum` and one partial `total` a row.

Logits live in base 2: `x = score * scale * log2(e)`, so that ex2 is the only exponential. `maximum`
is the reference that the accumulated weights are relative to. It follows the true maximum lazily:
weights may reach 2**RESCALE_THRESHOLD before the accumulator is rescaled. The result is exact all
the same, because numerator and denominator share the reference, and rescaling almost stops after
the first tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
RESCALE_THRESHOLD = 8.0  # log2; 2**8 times a sum of at most 2**20 keys is far from the end of fp32


@cute.jit
def exp2(x: Float32) -> Float32:
    """2**x by the special function unit; 0 at -inf."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp2_of_some(x: Float32) -> Float32:
    """`exp2` inside a branch, for the lanes that take it: the compiler does not move this one out
    of the branch, where all lanes would compute it.
    """
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that hold a row."""
    return cute.arch.warp_reduction_max(x, threads_in_group=4)


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that hold a row."""
    return cute.arch.warp_reduction_sum(x, threads_in_group=4)


@cute.jit
def quad_first(x: Float32) -> Float32:
    """The value of the first of the four lanes that hold a row."""
    return cute.arch.shuffle_sync(x, cute.arch.lane_idx() // 4 * 4)


@cute.jit
def thread_maxima(scores: cute.Tensor, maxima: cute.Tensor) -> None:
    """maxima[row] = largest of this thread's scores of the row."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        largest = scores[row, 0]
        for i in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
            largest = cute.arch.fmax(largest, scores[row, i])
        maxima[row] = largest


@cute.jit
def row_maxima(scores: cute.Tensor, maxima: cute.Tensor, scale_log2: Float32) -> None:
    """maxima[row] = largest logit of the row in this tile, in base 2. `scale_log2` is positive."""
    thread_maxima(scores, maxima)
    for row in cutlass.range_constexpr(cute.size(maxima)):
        maxima[row] = quad_max(maxima[row]) * scale_log2


@cute.jit
def outgrew(maximum: cute.Tensor, tile_maximum: cute.Tensor) -> Boolean:
    """Whether one of the thread's rows exceeds its reference by more than the threshold."""
    found = tile_maximum[0] - maximum[0] > RESCALE_THRESHOLD
    for row in cutlass.range_constexpr(1, cute.size(maximum)):
        found = found or tile_maximum[row] - maximum[row] > RESCALE_THRESHOLD
    return found


@cute.jit
def any_row_outgrew(maximum: cute.Tensor, tile_maximum: cute.Tensor) -> Boolean:
    """`outgrew` for some thread of the warp."""
    return cute.arch.vote_any_sync(outgrew(maximum, tile_maximum))


@cute.jit
def raise_maxima(
    maximum: cute.Tensor,
    total: cute.Tensor,
    tile_maximum: cute.Tensor,
    factor: cute.Tensor,
    has_weights: Boolean,
) -> None:
    """Move the references up to this tile's maxima; `factor` is what the accumulated rows must be
    scaled by, 1 before there are any.

    Lane r of a quad computes the exponential of row r for all four. An unmoved reference scales by
    1 even when it is infinite, where the difference would be NaN.
    """
    place = cute.arch.lane_idx() % 4
    difference = Float32(0.0)
    for row in cutlass.range_constexpr(cute.size(maximum)):
        raised = cute.arch.fmax(maximum[row], tile_maximum[row])
        if place == row and raised > maximum[row]:
            difference = maximum[row] - raised
        maximum[row] = raised
        factor[row] = Float32(1.0)
    if has_weights:
        own = Float32(1.0)
        if place < cute.size(maximum):
            own = exp2_of_some(difference)
        for row in cutlass.range_constexpr(cute.size(maximum)):
            factor[row] = cute.arch.shuffle_sync(own, cute.arch.lane_idx() - place + row)
            total[row] = total[row] * factor[row]


@cute.jit
def accumulate_weights(
    scores: cute.Tensor, maximum: cute.Tensor, total: cute.Tensor, scale_log2: Float32
) -> None:
    """Replace scores by their weights 2**(x - maximum) and add them, unrounded, to this
    thread's totals.
    """
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            weight = exp2(scores[row, i] * scale_log2 - maximum[row])
            scores[row, i] = weight
            total[row] = total[row] + weight
