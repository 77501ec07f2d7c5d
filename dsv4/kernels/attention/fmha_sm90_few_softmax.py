"""Online softmax of transposed scores: keys are the rows of a fragment, heads its columns.

A thread of the warpgroup holds two keys, 8 apart, of a pair of heads out of every 8: of head
`8 j + 2 (lane % 4) + c` what stands at `[key, c, j]` of `by_row`. The fragments of S^T and of O^T
agree in that, so that a head's factor needs no exchange to reach the accumulators. Its maximum
does: a head's keys are spread over all warps.
"""

import operator
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.fmha_sm90_device import by_row
from dsv4.kernels.attention.softmax import LOG2_E, exp2

WARPS = 4
# Another barrier than those of `Meeting.arrive`.
MATH_BARRIER = 3
PAIR = 2  # heads of a thread that are neighbours


class Heads(NamedTuple):
    """Softmax state of a thread's heads, each [pair, 8-head group] in registers."""

    ref: cute.Tensor  # log2 of what the weights are relative to
    sum: cute.Tensor  # of this thread's weights
    rescale: cute.Tensor  # factor of the older weights after the last block

    @classmethod
    def make(cls, heads: int):
        shape = (PAIR, heads // 8)
        return cls(*(cute.make_rmem_tensor(shape, cutlass.Float32) for _ in cls._fields))

    def reset(self) -> None:
        self.ref.fill(-cutlass.Float32.inf)
        self.sum.fill(0.0)

    def columns(self) -> list[tuple[int, int]]:
        return [(c, j) for j in range(cute.size(self.ref, mode=[1])) for c in range(PAIR)]


class Board(NamedTuple):
    """Where the warps of a warpgroup tell each other what they know of their heads."""

    values: cute.Tensor  # [head, warp] fp32 in shared memory
    sinks: cute.Tensor  # [head] natural log, in shared memory
    thread: cutlass.Int32  # of the warpgroup

    def sink(self, c: int, j: int) -> cutlass.Float32:
        """Of one of a thread's heads."""
        return self.sinks[8 * j + self.thread % 4 * 2 + c]

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=32 * WARPS)


def over_keys(operation, x: cutlass.Float32) -> cutlass.Float32:
    """Reduce over the lanes of a warp that hold the same heads."""
    for offset in (4, 8, 16):
        x = operation(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


@cute.jit
def exchange(operation: cutlass.Constexpr, values: cute.Tensor, board: Board):
    """Reduce [pair, 8-head group] values over all keys, in warp order, in place.

    A barrier must lie between this call and the last readers of the board.
    """
    lane, warp = board.thread % 32, board.thread // 32
    groups = cute.size(values, mode=[1])
    pairs = cute.logical_divide(board.values, (PAIR, None))
    for j in cutlass.range_constexpr(groups):
        for c in cutlass.range_constexpr(PAIR):
            values[c, j] = over_keys(operation, values[c, j])
        if lane < 4:
            cute.autovec_copy(values[None, j], pairs[(None, 4 * j + lane), warp])
    board.sync()
    parts = cute.make_rmem_tensor((PAIR, WARPS), cutlass.Float32)
    for j in cutlass.range_constexpr(groups):
        for i in cutlass.range_constexpr(WARPS):
            cute.autovec_copy(pairs[(None, 4 * j + lane % 4), i], parts[None, i])
        for c in cutlass.range_constexpr(PAIR):
            first, second = (operation(parts[c, i], parts[c, i + 1]) for i in (0, 2))
            values[c, j] = operation(first, second)


@cute.jit
def mask_keys(scores: cute.Tensor, valid: cutlass.Int32, thread):
    """No key from `valid` on has a weight."""
    s = by_row(scores)
    key = thread // 32 * 16 + thread % 32 // 4
    for r in cutlass.range_constexpr(2):
        if key + 8 * r >= valid:
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(PAIR):
                    s[r, c, j] = -cutlass.Float32.inf


@cute.jit
def softmax(
    scores: cute.Tensor,
    heads: Heads,
    board: Board,
    is_window: cutlass.Boolean,
    has_both: cutlass.Boolean,
    scale_log2: cutlass.Constexpr,
    is_gate: cutlass.Constexpr,
):
    """Turn scores into weights in place; `heads.rescale` is what older weights must be scaled by.

    The sink gate is a bias on the scores of one branch; see `fmha_sm90`. An empty branch leaves the
    other alone: the gate's sink then counts as 0.
    """
    s = by_row(scores)
    tops = cute.make_rmem_tensor_like(heads.ref)
    for c, j in heads.columns():
        tops[c, j] = cute.arch.fmax(s[0, c, j], s[1, c, j])
    exchange(cute.arch.fmax, tops, board)
    for c, j in heads.columns():
        top, bias = tops[c, j] * scale_log2, cutlass.Float32(0.0)
        if cutlass.const_expr(is_gate):
            sink = board.sink(c, j)
            low, high = cute.arch.fmin(sink, 0.0), -cute.arch.fmax(sink, 0.0)
            gate = cutlass.select_(is_window, low, high) * LOG2_E
            bias = cutlass.select_(has_both, gate, bias)
        old = heads.ref[c, j]
        ref = cute.arch.fmax(old, top + bias)
        # A head without a finite score so far: every weight is 2^-inf.
        origin = cutlass.select_(ref == -cutlass.Float32.inf, cutlass.Float32(0.0), ref)
        # A huge bias swallows the score in the reference, which would give an infinite weight.
        shift = cute.arch.fmin(bias - origin, -top)
        rescale = exp2(old - origin)
        for r in cutlass.range_constexpr(2):
            s[r, c, j] = exp2(s[r, c, j] * scale_log2 + shift)
        heads.ref[c, j], heads.rescale[c, j] = ref, rescale
        heads.sum[c, j] = heads.sum[c, j] * rescale + (s[0, c, j] + s[1, c, j])


@cute.jit
def total_sums(heads: Heads, board: Board):
    """Sum every head's weights over all keys, in place."""
    # The slowest warp may still read what the others said of the last block.
    board.sync()
    exchange(operator.add, heads.sum, board)


@cute.jit
def scale_heads(acc: cute.Tensor, heads: Heads):
    """Scale an accumulator fragment of O^T."""
    columns = by_row(acc)
    for c, j in heads.columns():
        for r in cutlass.range_constexpr(2):
            columns[r, c, j] *= heads.rescale[c, j]
