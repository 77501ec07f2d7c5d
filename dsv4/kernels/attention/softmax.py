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
def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that hold a row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that hold a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def row_maxima(scores: cute.Tensor, maxima: cute.Tensor, scale_log2: Float32) -> None:
    """maxima[row] = largest logit of the row in this tile, in base 2. `scale_log2` is positive."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        largest = scores[row, 0]
        for i in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
            largest = cute.arch.fmax(largest, scores[row, i])
        maxima[row] = quad_max(largest) * scale_log2


@cute.jit
def any_row_outgrew(maximum: cute.Tensor, tile_maximum: cute.Tensor) -> Boolean:
    """Whether some row of the warp exceeds its reference by more than the threshold. Uniform
    in the warp.
    """
    outgrew = tile_maximum[0] - maximum[0] > RESCALE_THRESHOLD
    for row in cutlass.range_constexpr(1, cute.size(maximum)):
        outgrew = outgrew or tile_maximum[row] - maximum[row] > RESCALE_THRESHOLD
    return cute.arch.vote_any_sync(outgrew)


@cute.jit
def raise_maxima(
    maximum: cute.Tensor, total: cute.Tensor, tile_maximum: cute.Tensor, factor: cute.Tensor
) -> None:
    """Move the references up to this tile's maxima; `factor` is what the accumulated rows must be
    scaled by.

    An unmoved reference scales by 1 even when it is infinite, where the difference would be NaN.
    """
    for row in cutlass.range_constexpr(cute.size(maximum)):
        raised = cute.arch.fmax(maximum[row], tile_maximum[row])
        factor[row] = exp2(maximum[row] - raised) if raised > maximum[row] else Float32(1.0)
        maximum[row] = raised
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


@cute.jit
def natural_lse(maximum: Float32, total: Float32) -> Float32:
    """ln of the sum of exp(logit), from a base-2 reference and the total relative to it; -inf
    when empty.
    """
    lse = -Float32.inf
    if total != 0.0:
        lse = (maximum + cute.math.log2(total, fastmath=True)) * LN_2
    return lse
