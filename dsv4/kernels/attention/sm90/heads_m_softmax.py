"""Online softmax of one warpgroup's m64n64 score fragment, relative to a stale reference."""

import operator
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.device import by_row, tree
from dsv4.kernels.attention.softmax import LOG2_E, RESCALE_THRESHOLD, exp2, quad_max


class Rows(NamedTuple):
    """Softmax state of the two rows that a thread holds, in registers."""

    ref: cute.Tensor  # [2] log2 of what the weights are relative to
    sum: cute.Tensor  # [2] of this thread's weights
    rescale: cute.Tensor  # [2] factor of the older weights after the last block
    bias: cute.Tensor  # [2, 2] added to log2 scores: of the row, in the compressed or window branch

    @classmethod
    def make(cls):
        sizes = (2, 2, 2, (2, 2))
        return cls(*(cute.make_rmem_tensor(size, cutlass.Float32) for size in sizes))

    def reset(self) -> None:
        self.ref.fill(-cutlass.Float32.inf)
        self.sum.fill(0.0)


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
            rows.bias[r, 0] = -offset[r] * LOG2_E
            rows.bias[r, 1] = cute.arch.fmin(sink, 0.0) * LOG2_E
    return offset


@cute.jit
def softmax(
    scores: cute.Tensor,
    rows: Rows,
    is_window: cutlass.Boolean,
    scale_log2: cutlass.Constexpr,
    is_gate: cutlass.Constexpr,
):
    """Turn scores into weights in place; `rows.rescale` is what older weights must be scaled by."""
    s = by_row(scores)
    columns = [(c, j) for j in range(cute.size(s, mode=[2])) for c in range(2)]
    bias = [cutlass.select_(is_window, rows.bias[r, 1], rows.bias[r, 0]) for r in range(2)]
    # Of this thread's columns: most blocks raise no reference, and then nobody needs the row's.
    tops = cute.make_rmem_tensor(2, cutlass.Float32)
    if cutlass.const_expr(is_gate):
        find_tops(s, columns, tops, scale_log2)
    else:
        bound_tops(scores, tops, scale_log2)
    rows.rescale.fill(1.0)
    excess = [tops[r] + bias[r] - rows.ref[r] for r in range(2)]
    # NaN - of rows and blocks without a score, -inf - (-inf) - is no excess.
    if cute.arch.vote_any_sync(cute.arch.fmax(excess[0], excess[1]) > RESCALE_THRESHOLD):
        if cutlass.const_expr(not is_gate):
            find_tops(s, columns, tops, scale_log2)
        raise_references(tops, bias, rows)
    for r in cutlass.range_constexpr(2):
        # A row without a finite score so far: every weight is 2^-inf.
        is_empty = rows.ref[r] == -cutlass.Float32.inf
        shift = bias[r] - cutlass.select_(is_empty, cutlass.Float32(0.0), rows.ref[r])
        # A huge bias swallows the score in the difference above, and the reference then forgets it:
        # a score of thousands would give an infinite weight, which no later rescaling by 0 removes.
        if cutlass.const_expr(is_gate):
            shift = cute.arch.fmin(shift, RESCALE_THRESHOLD - tops[r])
        weights = [exp2(s[r, c, j] * scale_log2 + shift) for c, j in columns]
        for (c, j), weight in zip(columns, weights, strict=True):
            s[r, c, j] = weight
        rows.sum[r] += tree(operator.add, weights)


def find_tops(s: cute.Tensor, columns, tops: cute.Tensor, scale_log2) -> None:
    """Largest log2 score of a thread's columns in each row."""
    for r in range(2):
        tops[r] = tree(cute.arch.fmax, [s[r, c, j] for c, j in columns]) * scale_log2


@cute.jit
def bound_tops(scores: cute.Tensor, tops: cute.Tensor, scale_log2: cutlass.Constexpr):
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
        tops[r] = floats[r] * scale_log2


def largest(values):
    """The largest of integers, three at a time."""
    while len(values) > 2:
        whole = len(values) // 3 * 3
        triples = zip(*(values[i:whole:3] for i in range(3)))
        values = [cutlass.max(cutlass.max(a, b), c) for a, b, c in triples] + values[whole:]
    return values[0] if len(values) == 1 else cutlass.max(*values)


@cute.jit
def raise_references(tops: cute.Tensor, bias, rows: Rows):
    """Move the references of the rows whose log2 scores exceed them by too much.

    Args:
        tops: [2] largest log2 scores among this thread's columns, without bias.
        rows: their `ref`, `sum` and `rescale` change.
    """
    for r in cutlass.range_constexpr(2):
        top = quad_max(tops[r]) + bias[r]
        old = rows.ref[r]
        is_raised = top > old + RESCALE_THRESHOLD
        new = cutlass.select_(is_raised, top, old)
        rescale = cutlass.select_(is_raised, exp2(old - new), cutlass.Float32(1.0))
        rows.ref[r] = new
        rows.rescale[r] = rescale
        rows.sum[r] *= rescale
