"""Online softmax of one warpgroup's m64n64 score fragment, relative to a stale row maximum."""

import operator
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.sink_gate import branch_biases
from dsv4.kernels.attention.softmax import RESCALE_THRESHOLD, exp2
from dsv4.kernels.kit.reduce import largest, quad_max, tree
from dsv4.kernels.kit.wgmma import by_row


class Rows(NamedTuple):
    """Softmax state of the two rows that a thread holds, in registers."""

    row_max: cute.Tensor  # [2] log2, what P is relative to; stale
    row_sum: cute.Tensor  # [2] of this thread's P
    rescale: cute.Tensor  # [2] factor of older P after the last key tile
    bias: cute.Tensor  # [2, 2] added to log2 scores: of the row, in the compressed or window branch
    scale: cute.Tensor | None = None  # [2] from scores to log2 scores, where rows have their own

    @classmethod
    def make(cls):
        sizes = (2, 2, 2, (2, 2))
        return cls(*(cute.make_rmem_tensor(size, cutlass.Float32) for size in sizes))

    def reset(self) -> None:
        self.row_max.fill(-cutlass.Float32.inf)
        self.row_sum.fill(0.0)

    def scales(self, scale_log2: float) -> list:
        """From scores to log2 scores, of both rows."""
        if self.scale is None:
            return [scale_log2, scale_log2]
        return [self.scale[0], self.scale[1]]


@cute.jit
def set_bias(
    rows: Rows,
    is_gate: cutlass.Constexpr,
    has_both,
    sink_logits,
    head,
    num_heads: cutlass.Constexpr,
):
    """Score biases of the sink gate; returns what they take off the log of the denominator."""
    offset = cute.make_rmem_tensor(2, cutlass.Float32)
    offset.fill(0.0)
    rows.bias.fill(0.0)
    if cutlass.const_expr(is_gate):
        # An empty branch leaves the other alone: the sink then counts as 0.
        for r in cutlass.range_constexpr(2):
            sink = cutlass.Float32(0.0)
            if has_both and head + 8 * r < num_heads:
                sink = sink_logits[head + 8 * r]
            offset[r] = cute.arch.fmax(sink, 0.0)
            rows.bias[r, 0], rows.bias[r, 1] = branch_biases(sink, offset[r])
    return offset


@cute.jit
def softmax(
    scores: cute.Tensor,
    rows: Rows,
    is_window: cutlass.Boolean,
    scale_log2: cutlass.Constexpr,
    is_gate: cutlass.Constexpr,
):
    """Turn scores into P in place; `rows.rescale` is what older P must be scaled by.

    Args:
        scale_log2: from scores to log2 scores, unless the rows have their own.
    """
    s = by_row(scores)
    scales = rows.scales(scale_log2)
    columns = [(c, j) for j in range(cute.size(s, mode=[2])) for c in range(2)]
    bias = [cutlass.select_(is_window, rows.bias[r, 1], rows.bias[r, 0]) for r in range(2)]
    # Of this thread's columns: most key tiles raise no row maximum, and then the row's is not
    # needed.
    tile_max = cute.make_rmem_tensor(2, cutlass.Float32)
    if cutlass.const_expr(is_gate):
        thread_maxima(s, columns, tile_max, scales)
    else:
        bound_maxima(scores, tile_max, scales)
    rows.rescale.fill(1.0)
    excess = [tile_max[r] + bias[r] - rows.row_max[r] for r in range(2)]
    # NaN - of rows and key tiles without a score, -inf - (-inf) - is no excess.
    if cute.arch.vote_any_sync(cute.arch.fmax(excess[0], excess[1]) > RESCALE_THRESHOLD):
        if cutlass.const_expr(not is_gate):
            thread_maxima(s, columns, tile_max, scales)
        update_row_max(tile_max, bias, rows)
    for r in cutlass.range_constexpr(2):
        # A row without a finite score so far: all of P is 2^-inf.
        is_empty = rows.row_max[r] == -cutlass.Float32.inf
        shift = bias[r] - cutlass.select_(is_empty, cutlass.Float32(0.0), rows.row_max[r])
        # A huge bias swallows the score in the difference above, and the row maximum then forgets
        # it: a score of thousands would give an infinite P, which no later rescaling by 0 removes.
        if cutlass.const_expr(is_gate):
            shift = cute.arch.fmin(shift, RESCALE_THRESHOLD - tile_max[r])
        p = [exp2(s[r, c, j] * scales[r] + shift) for c, j in columns]
        for (c, j), value in zip(columns, p, strict=True):
            s[r, c, j] = value
        rows.row_sum[r] += tree(operator.add, p)


def thread_maxima(s: cute.Tensor, columns, tile_max: cute.Tensor, scales) -> None:
    """Largest log2 score of a thread's columns in each row."""
    for r in range(2):
        tile_max[r] = tree(cute.arch.fmax, [s[r, c, j] for c, j in columns]) * scales[r]


@cute.jit
def bound_maxima(scores: cute.Tensor, tile_max: cute.Tensor, scales):
    """Largest log2 score of a thread's columns in each row, or 0 where all are below: in half the
    instructions, since the machine compares three integers at a time, and from 0 on the bits of
    floats are in the order of the floats."""
    bits = by_row(cute.recast_tensor(scores, cutlass.Int32))
    bounds = cute.make_rmem_tensor(2, cutlass.Int32)
    for r in cutlass.range_constexpr(2):
        columns = [bits[r, c, j] for j in range(cute.size(bits, mode=[2])) for c in range(2)]
        bounds[r] = largest([cutlass.Int32(0), *columns])
    floats = cute.recast_tensor(bounds, cutlass.Float32)
    for r in cutlass.range_constexpr(2):
        tile_max[r] = floats[r] * scales[r]


@cute.jit
def update_row_max(tile_max: cute.Tensor, bias, rows: Rows):
    """Update the maxima of the rows whose log2 scores exceed them by too much.

    Args:
        tile_max: [2] largest log2 scores among this thread's columns, without bias.
        rows: their `row_max`, `row_sum` and `rescale` change.
    """
    for r in cutlass.range_constexpr(2):
        new_max = quad_max(tile_max[r]) + bias[r]
        old = rows.row_max[r]
        exceeds = new_max > old + RESCALE_THRESHOLD
        new = cutlass.select_(exceeds, new_max, old)
        rescale = cutlass.select_(exceeds, exp2(old - new), cutlass.Float32(1.0))
        rows.row_max[r] = new
        rows.rescale[r] = rescale
        rows.row_sum[r] *= rescale
