"""Online softmax over a per-thread accumulator fragment. Nothing here depends on the architecture.

A thread holds two rows of a tile of scores, and a quad of lanes holds a row together: the fragment
of wgmma and of the 16x256b TMEM load. `scores[row, i]` is row `row` of the two; the running state
is one `row_max` and one partial `row_sum` a row.

Logits live in base 2: `x = score * scale * log2(e)`, so that ex2 is the only exponential. `row_max`
is what P is relative to: P = 2**(x - row_max). It is stale, it follows the true maximum lazily: P
may reach 2**RESCALE_THRESHOLD before O is rescaled. The result is exact all the same, because O and
`row_sum` share it, and rescaling almost stops after the first tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from dsv4.kernels.kit.reduce import quad_max

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
RESCALE_THRESHOLD = 8.0  # log2; 2**8 times a sum of at most 2**20 keys is far from the end of fp32


@cute.jit
def exp2(x: Float32) -> Float32:
    """2**x by the special function unit; 0 at -inf."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp2_in_branch(x: Float32) -> Float32:
    """`exp2` that stays in its branch: the compiler would move the other one out of it, where all
    lanes compute it.
    """
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


@cute.jit
def quad_first(x: Float32) -> Float32:
    """The value of the first of the four lanes that hold a row."""
    return cute.arch.shuffle_sync(x, cute.arch.lane_idx() // 4 * 4)


@cute.jit
def thread_max(scores: cute.Tensor, tile_max: cute.Tensor) -> None:
    """tile_max[row] = largest of this thread's scores of the row."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        largest = scores[row, 0]
        for i in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
            largest = cute.arch.fmax(largest, scores[row, i])
        tile_max[row] = largest


def row_scale(scale_log2: Float32 | cute.Tensor, row: int) -> Float32:
    """Factor from scores to logits in base 2: one for all rows, or one for each."""
    return scale_log2[row] if isinstance(scale_log2, cute.Tensor) else scale_log2


@cute.jit
def quad_tile_max(
    scores: cute.Tensor, tile_max: cute.Tensor, scale_log2: Float32 | cute.Tensor
) -> None:
    """tile_max[row] = largest logit of the row in this tile, base 2; `scale_log2` is positive."""
    thread_max(scores, tile_max)
    for row in cutlass.range_constexpr(cute.size(tile_max)):
        tile_max[row] = quad_max(tile_max[row]) * row_scale(scale_log2, row)


@cute.jit
def exceeds_rescale_threshold(row_max: cute.Tensor, tile_max: cute.Tensor) -> Boolean:
    """Whether one of the thread's tile maxima is too far above the stale row maximum."""
    found = tile_max[0] - row_max[0] > RESCALE_THRESHOLD
    for row in cutlass.range_constexpr(1, cute.size(row_max)):
        found = found or tile_max[row] - row_max[row] > RESCALE_THRESHOLD
    return found


@cute.jit
def warp_exceeds_rescale_threshold(row_max: cute.Tensor, tile_max: cute.Tensor) -> Boolean:
    """`exceeds_rescale_threshold` for some thread of the warp."""
    return cute.arch.vote_any_sync(exceeds_rescale_threshold(row_max, tile_max))


@cute.jit
def update_row_max(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    tile_max: cute.Tensor,
    factor: cute.Tensor,
    has_o: Boolean,
) -> None:
    """Raise `row_max` to this tile's maxima and rescale `row_sum`; `factor` is what O must be
    scaled by, 1 before there is any.

    Lane r of a quad computes the exponential of row r for all four. A row whose maximum stays is
    scaled by 1 even when the maximum is infinite, where the difference would be NaN.
    """
    quad_lane = cute.arch.lane_idx() % 4
    difference = Float32(0.0)
    for row in cutlass.range_constexpr(cute.size(row_max)):
        raised = cute.arch.fmax(row_max[row], tile_max[row])
        if quad_lane == row and raised > row_max[row]:
            difference = row_max[row] - raised
        row_max[row] = raised
        factor[row] = Float32(1.0)
    if has_o:
        own = Float32(1.0)
        if quad_lane < cute.size(row_max):
            own = exp2_in_branch(difference)
        for row in cutlass.range_constexpr(cute.size(row_max)):
            factor[row] = cute.arch.shuffle_sync(own, cute.arch.lane_idx() - quad_lane + row)
            row_sum[row] = row_sum[row] * factor[row]


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32 | cute.Tensor,
) -> None:
    """Replace scores by P = 2**(x - row_max) and add P, unrounded, to this thread's row sums."""
    for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            p = exp2(scores[row, i] * row_scale(scale_log2, row) - row_max[row])
            scores[row, i] = p
            row_sum[row] = row_sum[row] + p


@cute.jit
def finite_reference(row_max: cute.Tensor) -> cute.Tensor:
    """Row maxima to exponentiate by: 0 for a row without a key so far, all of whose P is then 0;
    relative to its maximum, -inf, it would be NaN.
    """
    reference = cute.make_rmem_tensor(cute.size(row_max), Float32)
    for row in cutlass.range_constexpr(cute.size(row_max)):
        is_empty = row_max[row] == -Float32.inf
        reference[row] = cutlass.select_(is_empty, Float32(0.0), row_max[row])
    return reference
