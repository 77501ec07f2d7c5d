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

from dsv4.kernels.attention.sm90.device import by_row, tree
from dsv4.kernels.attention.softmax import LOG2_E, RESCALE_THRESHOLD, exp2

WARPS = 4
# Another barrier than those of `Meeting.arrive`.
MATH_BARRIER = 3
PAIR = 2  # heads of a thread that are neighbours


class Heads(NamedTuple):
    """Softmax state of a thread's heads, each [pair, 8-head group] in registers."""

    ref: cute.Tensor  # log2 of what the weights are relative to
    sum: cute.Tensor  # of this thread's weights
    rescale: cute.Tensor  # factor of the accumulators, 1 unless a reference has risen

    @classmethod
    def make(cls, heads: int):
        shape = (PAIR, heads // 8)
        return cls(*(cute.make_rmem_tensor(shape, cutlass.Float32) for _ in cls._fields))

    def reset(self) -> None:
        self.ref.fill(-cutlass.Float32.inf)
        self.sum.fill(0.0)

    def are_raised(self) -> cutlass.Boolean:
        """Whether a reference of this warp's heads has risen.

        From the factors, and by a vote: where the compiler cannot see that all lanes go the same
        way it serialises the products around the branch.
        """
        factors = [self.rescale[c, j] != 1.0 for c, j in self.columns()]
        return cute.arch.vote_any_sync(tree(lambda a, b: a | b, factors))

    def columns(self) -> list[tuple[int, int]]:
        return [(c, j) for j in range(cute.size(self.ref, mode=[1])) for c in range(PAIR)]


class Board(NamedTuple):
    """Where the warps of a warpgroup tell each other what they know of their heads."""

    tops: cute.Tensor  # [pair, heads / 2, warp] fp32 in shared memory
    totals: cute.Tensor  # the same
    sinks: cute.Tensor  # [head] natural log, in shared memory
    thread: cutlass.Int32  # of the warpgroup
    head: cutlass.Int32  # first one of the work item

    def of_heads(self, head):
        """The board for a work item of heads from `head` on."""
        return self._replace(head=head)

    def sink(self, c: int, j: int) -> cutlass.Float32:
        """Of one of a thread's heads."""
        return self.sinks[self.head + 8 * j + self.thread % 4 * 2 + c]

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=32 * WARPS)

    def any(self, condition: cutlass.Boolean) -> cutlass.Boolean:
        """Whether it is true of any thread; a barrier like `sync`."""
        count = cute.arch.inline_ptx(
            f"barrier.cta.red.popc.aligned.u32 {{$w0}}, {MATH_BARRIER}, {32 * WARPS}, {{$r0}};",
            write_only_types=[cutlass.Int32],
            read_only_args=[condition],
        )
        return count != 0


def over_keys(operation, x: cutlass.Float32) -> cutlass.Float32:
    """Reduce over the lanes of a warp that hold the same heads."""
    for offset in (4, 8, 16):
        x = operation(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


@cute.jit
def exchange(operation: cutlass.Constexpr, values: cute.Tensor, words: cute.Tensor, board: Board):
    """Reduce [pair, 8-head group] values over all keys, in place.

    A barrier must lie between this call and the last readers of `words`, a part of the board.
    """
    lane, warp = board.thread % 32, board.thread // 32
    groups = cute.size(values, mode=[1])
    for j in cutlass.range_constexpr(groups):
        for c in cutlass.range_constexpr(PAIR):
            values[c, j] = over_keys(operation, values[c, j])
        if lane < 4:
            cute.autovec_copy(values[None, j], words[None, 4 * j + lane, warp])
    board.sync()
    parts = cute.make_rmem_tensor((PAIR, WARPS), cutlass.Float32)
    for j in cutlass.range_constexpr(groups):
        cute.autovec_copy(words[None, 4 * j + lane % 4, None], parts)
        for c in cutlass.range_constexpr(PAIR):
            values[c, j] = tree(operation, [parts[c, i] for i in range(WARPS)])


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


def gate_biases(heads: Heads, board: Board, is_window, has_both, is_gate: bool) -> list:
    """The sink gate as a bias on the log2 scores of one branch; see `fmha_sm90`. An empty branch
    leaves the other alone: the gate's sink then counts as 0.

    Returns:
        The bias of each of `heads.columns()`.
    """
    biases = []
    for c, j in heads.columns():
        bias = cutlass.Float32(0.0)
        if is_gate:
            sink = board.sink(c, j)
            low, high = cute.arch.fmin(sink, 0.0), -cute.arch.fmax(sink, 0.0)
            gate = cutlass.select_(is_window, low, high) * LOG2_E
            bias = cutlass.select_(has_both, gate, bias)
        biases.append(bias)
    return biases


def weigh_keys(scores: cute.Tensor, weights: cute.Tensor, heads: Heads, biases, scale_log2):
    """Weights relative to the references as they are. Returns whether they may stay so: none is too
    large, or of a head without a reference."""
    s, w = by_row(scores), by_row(weights)
    is_right = cutlass.Boolean(True)
    for (c, j), bias in zip(heads.columns(), biases, strict=True):
        shift = bias - heads.ref[c, j]
        for r in range(2):
            weight = exp2(s[r, c, j] * scale_log2 + shift)
            is_right = is_right & (weight <= 2.0**RESCALE_THRESHOLD)
            w[r, c, j] = weight
    return is_right


@cute.jit
def raise_references(
    scores: cute.Tensor,
    weights: cute.Tensor,
    heads: Heads,
    board: Board,
    biases,
    scale_log2: cutlass.Constexpr,
):
    """Move the references up to the largest scores, and weigh the keys by the new ones;
    `heads.rescale` is what the accumulators must be scaled by."""
    s, w = by_row(scores), by_row(weights)
    tops = cute.make_rmem_tensor_like(heads.ref)
    for c, j in heads.columns():
        tops[c, j] = cute.arch.fmax(s[0, c, j], s[1, c, j])
    exchange(cute.arch.fmax, tops, board.tops, board)
    for (c, j), bias in zip(heads.columns(), biases):
        top, old = tops[c, j] * scale_log2, heads.ref[c, j]
        ref = cute.arch.fmax(old, top + bias)
        # A head without a finite score so far: every weight is 2^-inf.
        origin = cutlass.select_(ref == -cutlass.Float32.inf, cutlass.Float32(0.0), ref)
        # A huge bias swallows the score in the reference, which would give an infinite weight.
        shift = cute.arch.fmin(bias - origin, -top)
        rescale = exp2(old - origin)
        for r in cutlass.range_constexpr(2):
            w[r, c, j] = exp2(s[r, c, j] * scale_log2 + shift)
        heads.ref[c, j], heads.rescale[c, j] = ref, rescale
        heads.sum[c, j] *= rescale


def add_weights(weights: cute.Tensor, heads: Heads) -> None:
    """Add a block's weights to the sums."""
    w = by_row(weights)
    for c, j in heads.columns():
        heads.sum[c, j] += w[0, c, j] + w[1, c, j]


def store_weights(weights: cute.Tensor, p: cute.Pointer, warp, lane, dtype) -> None:
    """Write weights, transposed, into P [head, key]: rows of 128 bytes in the swizzle of that span,
    16 keys of each warp."""
    groups = cute.size(weights) // 4
    values = cute.make_rmem_tensor(cute.size(weights), dtype)
    for i in range(cute.size(weights)):
        values[i] = weights[i].to(dtype)
    words = cute.recast_tensor(values, cutlass.Int32)
    # Two 8 x 8 matrices of a group of heads. A lane says where a row of one of them goes.
    chunk = 2 * warp + lane // 8 % 2
    row = p.toint() + lane % 8 * 128 + (chunk ^ lane % 8) * 16
    for j in range(0, groups, 2):
        count = 2 * min(groups - j, 2)
        head = 8 * (j + lane // 16 % (count // 2))
        names = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [{{$r0}}], {{{names}}};",
            read_only_args=[row + head * 128, *(words[2 * j + i] for i in range(count))],
        )


@cute.jit
def total_sums(heads: Heads, board: Board):
    """Sum every head's weights over all keys, in place."""
    # If this work item has no keys, the slowest warp may still read the totals of the one before.
    board.sync()
    exchange(operator.add, heads.sum, board.totals, board)


@cute.jit
def scale_heads(acc: cute.Tensor, heads: Heads):
    """Scale an accumulator fragment of O^T."""
    columns = by_row(acc)
    for c, j in heads.columns():
        for r in cutlass.range_constexpr(2):
            columns[r, c, j] *= heads.rescale[c, j]
