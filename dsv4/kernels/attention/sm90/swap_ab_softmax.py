"""Online softmax of transposed scores: keys are the rows of a fragment, heads its columns.

A thread of the warpgroup holds two keys, 8 apart, of a pair of heads out of every 8: of head
`8 j + 2 (lane % 4) + c` what stands at `[key, c, j]` of `by_row`. The fragments of S^T and of O^T
agree in that, so that a head's factor needs no exchange to reach the accumulators. Its maximum
does: a head's keys are spread over all warps.
"""

import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.named_barriers import SwapAbBarrier
from dsv4.kernels.attention.sm90.sink_gate import branch_bias
from dsv4.kernels.attention.sm90.swap_ab_context import PAIR, WARPS, Smem
from dsv4.kernels.attention.softmax import RESCALE_THRESHOLD, exp2
from dsv4.kernels.kit.reduce import across_quads, tree
from dsv4.kernels.kit.wgmma import by_row


class Heads(NamedTuple):
    """Softmax state of a thread's heads, each [pair, 8-head group] in registers."""

    row_max: cute.Tensor  # log2, what P is relative to; stale
    row_sum: cute.Tensor  # of this thread's P
    rescale: cute.Tensor  # factor of the accumulators, 1 unless a row maximum was updated
    scale: cute.Tensor | None = None  # from scores to log2 scores, where heads have their own
    largest: cute.Tensor | None = None  # of this thread's log2 scores, where they are asked for
    negative: cute.Tensor | None = None  # a bit for each whose factor is negative, in one word

    @classmethod
    def make(cls, heads: int, is_paged: bool = False):
        tensors = 5 if is_paged else 3
        shape = (PAIR, heads // 8)
        found = [cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(tensors)]
        return cls(*found, *([cute.make_rmem_tensor(1, cutlass.Int32)] if is_paged else []))

    def scale_of(self, c: int, j: int, scale_log2: float):
        """From scores to log2 scores of one of a thread's heads."""
        return scale_log2 if self.scale is None else self.scale[c, j]

    def reset(self) -> None:
        self.row_max.fill(-cutlass.Float32.inf)
        self.row_sum.fill(0.0)

    def are_updated(self) -> cutlass.Boolean:
        """Whether a row maximum of this warp's heads was updated.

        From the factors, and by a vote: where the compiler cannot see that all lanes go the same
        way it serialises the products around the branch.
        """
        factors = [self.rescale[c, j] != 1.0 for c, j in self.columns()]
        return cute.arch.vote_any_sync(tree(lambda a, b: a | b, factors))

    def columns(self) -> list[tuple[int, int]]:
        return [(c, j) for j in range(cute.size(self.row_max, mode=[1])) for c in range(PAIR)]


@dataclass(frozen=True)
class ReductionScratch:
    """Shared memory and named barrier by which the warps of a warpgroup reduce over keys."""

    tile_max: cute.Tensor  # [pair, heads / 2, warp] fp32
    row_sums: cute.Tensor  # the same
    sinks: cute.Tensor  # [head] natural log
    thread: cutlass.Int32  # of the warpgroup
    head: cutlass.Int32  # first one of the work tile

    @classmethod
    def of(cls, smem: Smem, thread):
        return cls(smem.tile_max, smem.row_sums, smem.sinks, thread, cutlass.Int32(0))

    def of_heads(self, head):
        """The scratch of a work tile of heads from `head` on."""
        return replace(self, head=head)

    def sink(self, c: int, j: int) -> cutlass.Float32:
        """Of one of a thread's heads."""
        return self.sinks[self.head + 8 * j + self.thread % 4 * 2 + c]

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=SwapAbBarrier.MATH, number_of_threads=32 * WARPS)

    def any(self, condition: cutlass.Boolean) -> cutlass.Boolean:
        """Whether it is true of any thread; a barrier like `sync`."""
        barrier = int(SwapAbBarrier.MATH)
        count = cute.arch.inline_ptx(
            f"barrier.cta.red.popc.aligned.u32 {{$w0}}, {barrier}, {32 * WARPS}, {{$r0}};",
            write_only_types=[cutlass.Int32],
            read_only_args=[condition],
        )
        return count != 0


@cute.jit
def reduce_over_keys(
    operation: cutlass.Constexpr,
    values: cute.Tensor,
    words: cute.Tensor,
    scratch: ReductionScratch,
):
    """Reduce [pair, 8-head group] values over all keys, in place.

    A barrier must lie between this call and the last readers of `words`, a part of the scratch.
    """
    lane, warp = scratch.thread % 32, scratch.thread // 32
    groups = cute.size(values, mode=[1])
    for j in cutlass.range_constexpr(groups):
        for c in cutlass.range_constexpr(PAIR):
            values[c, j] = across_quads(operation, values[c, j])
        if lane < 4:
            cute.autovec_copy(values[None, j], words[None, 4 * j + lane, warp])
    scratch.sync()
    parts = cute.make_rmem_tensor((PAIR, WARPS), cutlass.Float32)
    for j in cutlass.range_constexpr(groups):
        cute.autovec_copy(words[None, 4 * j + lane % 4, None], parts)
        for c in cutlass.range_constexpr(PAIR):
            values[c, j] = tree(operation, [parts[c, i] for i in range(WARPS)])


@cute.jit
def mask_keys(scores: cute.Tensor, valid: cutlass.Int32, thread):
    """Set the scores of keys from `valid` on to -inf."""
    s = by_row(scores)
    key = thread // 32 * 16 + thread % 32 // 4
    for r in cutlass.range_constexpr(2):
        if key + 8 * r >= valid:
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(PAIR):
                    s[r, c, j] = -cutlass.Float32.inf


def gate_biases(
    heads: Heads, scratch: ReductionScratch, is_window, has_both, is_gate: bool
) -> list:
    """The bias of the sink gate on the log2 scores of each of `heads.columns()`."""
    biases = []
    for c, j in heads.columns():
        bias = cutlass.Float32(0.0)
        if is_gate:
            gate = branch_bias(scratch.sink(c, j), is_window)
            bias = cutlass.select_(has_both, gate, bias)
        biases.append(bias)
    return biases


def exponentiate(scores: cute.Tensor, p: cute.Tensor, heads: Heads, biases, scale_log2):
    """P relative to the row maxima as they are. Returns whether these may stay so: none of P is too
    large, or of a head without a maximum."""
    s, w = by_row(scores), by_row(p)
    may_stay = cutlass.Boolean(True)
    for (c, j), bias in zip(heads.columns(), biases, strict=True):
        shift = bias - heads.row_max[c, j]
        scale = heads.scale_of(c, j, scale_log2)
        for r in range(2):
            value = exp2(s[r, c, j] * scale + shift)
            may_stay = may_stay & (value <= 2.0**RESCALE_THRESHOLD)
            w[r, c, j] = value
    return may_stay


@cute.jit
def update_row_max(
    scores: cute.Tensor,
    p: cute.Tensor,
    heads: Heads,
    scratch: ReductionScratch,
    biases,
    scale_log2: cutlass.Constexpr,
):
    """Update the row maxima to the largest scores, and P to the new ones; `heads.rescale` is what
    the accumulators must be scaled by."""
    s, w = by_row(scores), by_row(p)
    tile_max = cute.make_rmem_tensor_like(heads.row_max)
    for c, j in heads.columns():
        tile_max[c, j] = cute.arch.fmax(s[0, c, j], s[1, c, j])
    reduce_over_keys(cute.arch.fmax, tile_max, scratch.tile_max, scratch)
    for (c, j), bias in zip(heads.columns(), biases):
        scale = heads.scale_of(c, j, scale_log2)
        top, old = tile_max[c, j] * scale, heads.row_max[c, j]
        row_max = cute.arch.fmax(old, top + bias)
        # A head without a finite score so far: all of P is 2^-inf.
        origin = cutlass.select_(row_max == -cutlass.Float32.inf, cutlass.Float32(0.0), row_max)
        # A huge bias swallows the score in the row maximum, which would give an infinite P.
        shift = cute.arch.fmin(bias - origin, -top)
        rescale = exp2(old - origin)
        for r in cutlass.range_constexpr(2):
            w[r, c, j] = exp2(s[r, c, j] * scale + shift)
        heads.row_max[c, j], heads.rescale[c, j] = row_max, rescale
        heads.row_sum[c, j] *= rescale


def add_to_row_sums(p: cute.Tensor, heads: Heads) -> None:
    """Add a key tile's P to the row sums."""
    w = by_row(p)
    for c, j in heads.columns():
        heads.row_sum[c, j] += w[0, c, j] + w[1, c, j]


def store_p(p: cute.Tensor, target: cute.Pointer, warp, lane, dtype) -> None:
    """Write P, transposed, as [head, key]: rows of 128 bytes in the swizzle of that span, 16 keys
    of each warp."""
    groups = cute.size(p) // 4
    values = cute.make_rmem_tensor(cute.size(p), dtype)
    for i in range(cute.size(p)):
        values[i] = p[i].to(dtype)
    words = cute.recast_tensor(values, cutlass.Int32)
    # Two 8 x 8 matrices of a group of heads. Each lane holds the address of a row of one of them.
    chunk = 2 * warp + lane // 8 % 2
    row = target.toint() + lane % 8 * 128 + (chunk ^ lane % 8) * 16
    for j in range(0, groups, 2):
        count = 2 * min(groups - j, 2)
        head = 8 * (j + lane // 16 % (count // 2))
        names = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [{{$r0}}], {{{names}}};",
            read_only_args=[row + head * 128, *(words[2 * j + i] for i in range(count))],
        )


@cute.jit
def reduce_row_sums(heads: Heads, scratch: ReductionScratch):
    """Sum every head's P over all keys, in place."""
    # If this work tile has no keys, the slowest warp may still read the sums of the one before.
    scratch.sync()
    reduce_over_keys(operator.add, heads.row_sum, scratch.row_sums, scratch)


@cute.jit
def scale_heads(acc: cute.Tensor, heads: Heads):
    """Scale an accumulator fragment of O^T."""
    columns = by_row(acc)
    for c, j in heads.columns():
        for r in cutlass.range_constexpr(2):
            columns[r, c, j] *= heads.rescale[c, j]
