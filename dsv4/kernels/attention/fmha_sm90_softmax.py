"""Online softmax of one warpgroup's m64n64 score fragment, relative to a stale reference."""

import operator
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.fmha_sm90_device import by_row, tree
from dsv4.kernels.attention.softmax import RESCALE_THRESHOLD, exp2, quad_max


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
def softmax(
    scores: cute.Tensor, rows: Rows, is_window: cutlass.Boolean, scale_log2: cutlass.Constexpr
):
    """Turn scores into weights in place; `rows.rescale` is what older weights must be scaled by."""
    s = by_row(scores)
    columns = [(c, j) for j in range(cute.size(s, mode=[2])) for c in range(2)]
    tops = [tree(cute.arch.fmax, [s[r, c, j] for c, j in columns]) for r in range(2)]
    tops = [quad_max(top) for top in tops]
    for r in cutlass.range_constexpr(2):
        bias = cutlass.select_(is_window, rows.bias[r, 1], rows.bias[r, 0])
        top = tops[r] * scale_log2 + bias
        old = rows.ref[r]
        is_raised = top > old + RESCALE_THRESHOLD
        new = cutlass.select_(is_raised, top, old)
        rescale = cutlass.select_(is_raised, exp2(old - new), cutlass.Float32(1.0))
        # A row without a finite score so far: every weight is 2^-inf.
        is_empty = new == -cutlass.Float32.inf
        shift = bias - cutlass.select_(is_empty, cutlass.Float32(0.0), new)
        # A huge bias swallows the score in `top`: the difference above then forgets it, and a
        # score of thousands would give an infinite weight, which no later rescaling by 0 removes.
        shift = cute.arch.fmin(shift, RESCALE_THRESHOLD - tops[r] * scale_log2)
        weights = [exp2(s[r, c, j] * scale_log2 + shift) for c, j in columns]
        for (c, j), weight in zip(columns, weights, strict=True):
            s[r, c, j] = weight
        rows.sum[r] = rows.sum[r] * rescale + tree(operator.add, weights)
        rows.ref[r] = new
        rows.rescale[r] = rescale
