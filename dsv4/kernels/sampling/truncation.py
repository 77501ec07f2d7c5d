"""Sets of likeliest tokens: by number (top_k), and by share of the mass (top_p), exactly.

Probabilities are multiples of 2^-44, so that masses are integers, whose sums are exact in any
order. They are ordered by the bits that they have as floats, and of equals by token. Which tokens
are the first k of this order is found digit by digit: for each digit the CTAs of the cluster count
their tokens by its values; every CTA reads the others' counts, and all find the value at which the
number is reached. What is left to tell apart are the tokens of that value: after two digits there
is usually one.

    digit             0                1                2                    3, 4
    of the key        bits 18 and up   bits 9 to 17     bits 0 to 8          equal
    of the token                                                             bits 9 to 17, 0 to 8

Where a share of the mass ends is not looked for. A token belongs to it if those before it have less
than the share: the one that is drawn of all is looked at, and while it does not belong, drawn again
of those before it. That is the token that a draw of the share alone gives, for a draw is an arg
max; and of a share of 0.9 it is the first one nine times out of ten.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit.remote import load_remote, store_remote
from dsv4.kernels.sampling import numbers
from dsv4.kernels.sampling.config import THREADS, VECTOR, WARP, RowTiling

WARPS = THREADS // WARP
MANTISSA = 23
LEAST_BITS = (127 - numbers.MASS_BITS) << MANTISSA  # of 2^-44, whose key is 0
FIRST_SHIFT, SHIFT = 18, 9
FIRST_VALUES = (numbers.MASS_BITS << (MANTISSA - FIRST_SHIFT)) + 1  # of keys up to that of 1
VALUES = 1 << SHIFT
THREAD_VALUES = 4
PADDED = FIRST_VALUES + -FIRST_VALUES % THREAD_VALUES
DIGITS, KEY_DIGITS = 5, 3
LAST_TOKEN = (1 << 2 * SHIFT) - 1  # that two digits can tell


class Board(NamedTuple):
    """Shared memory of a CTA."""

    counts: cute.Tensor  # [PADDED] int32: tokens by value of a digit
    warp_sums: cute.Tensor  # [WARPS] int32
    warp_masses: cute.Tensor  # [WARPS] int64
    rank_masses: cute.Tensor  # [2 ranks] int32: what each CTA of the cluster sends, low words first
    found: cute.Tensor  # [2] int32: value of a digit, its tokens
    found_above: cute.Tensor  # [1] int32: those above it


class Cut(NamedTuple):
    """Tokens with a larger key than this, and of its equals those up to a token."""

    key: Int32
    token: Int32

    def keeps(self, key: Int32, token: Int32) -> Boolean:
        """Whether a token is one of them."""
        return (key > self.key) | ((key == self.key) & (token <= self.token))


def key_of(p: Float32) -> Int32:
    """Order key of a probability, a multiple of 2^-44; negative of 0."""
    return p.bitcast(Int32) - LEAST_BITS


def in_units(p: Float32) -> Float32:
    """A probability rounded to a multiple of 2^-44."""
    rounder = Float32(numbers.MASS_ROUNDER)
    return Float32(cutlass.select_(p < rounder, (p + rounder) - rounder, p))


class Truncation:
    """Cuts of a row of probabilities that a cluster's threads hold."""

    def __init__(self, tiling: RowTiling):
        self.tiling = tiling

    def allocate(self) -> Board:
        """The shared memory of a CTA."""
        smem = SmemAllocator()

        def tensor(count: int, dtype: type = Int32) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

        return Board(
            tensor(PADDED), tensor(WARPS), tensor(WARPS, Int64), tensor(2 * self.tiling.ranks),
            tensor(2), tensor(1),
        )  # fmt: skip

    @cute.jit
    def cut(self, smem: Board, p: cute.Tensor, first: Int32, top_k: Int32, rank: Int32) -> Cut:
        """The cut behind the number `top_k`; the thread's probabilities behind it become 0."""
        above = Int32(0)  # tokens above those that the digits so far leave
        key, token = Int32(0), Int32(LAST_TOKEN)
        number, base = Int32(0), Int32(0)
        while number < DIGITS:
            shift = Int32(0)
            if number == 0:
                shift = Int32(FIRST_SHIFT)
            elif number != KEY_DIGITS - 1 and number != DIGITS - 1:
                shift = Int32(SHIFT)
            values = Int32(cutlass.select_(number == 0, Int32(FIRST_VALUES), Int32(VALUES)))
            self.count(smem, p, first, (number, base, shift, key), values)
            counts = self.totals(smem, values, rank)
            before, total = sums_before(smem, counts)
            if cutlass.const_expr(self.tiling.ranks > 1):
                # The others have read this CTA's counts.
                cute.arch.cluster_wait()
            if number == 0 and total <= top_k:
                number = Int32(DIGITS)  # all are kept
            else:
                locate(smem, counts, above + before, top_k)
                cute.arch.sync_threads()
                value, there, above = base + smem.found[0], smem.found[1], smem.found_above[0]
                if number < KEY_DIGITS:
                    key = value << shift
                else:
                    token = LAST_TOKEN - (value << shift)
                base = value << SHIFT
                number += 1
                if above + there <= top_k:
                    # All of these tokens are kept: to tell them apart would be in vain.
                    number = Int32(DIGITS)
                if number == KEY_DIGITS:
                    base = Int32(0)
        found = Cut(key, token)
        self.drop(p, first, found)
        return found

    @cute.jit
    def mass(self, smem: Board, p: cute.Tensor, first: Int32, cut: Cut, rank: Int32) -> Int64:
        """Mass of the row's tokens before a cut."""
        ranks = self.tiling.ranks
        thread = cute.arch.thread_idx()[0]
        total = Int64(0)
        for j in cutlass.range_constexpr(self.tiling.held):
            token = (first + j * THREADS + thread) * VECTOR
            for i in cutlass.range_constexpr(VECTOR):
                is_counted = cut.keeps(key_of(p[i, j]), token + i)
                own = Float32(cutlass.select_(is_counted, p[i, j], Float32(0.0)))
                total += Int64(own * Float32(2.0**numbers.MASS_BITS))
        for step in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        # The sums of a mass before are read.
        cute.arch.sync_threads()
        if thread % WARP == 0:
            smem.warp_masses[thread // WARP] = total
        cute.arch.sync_threads()
        total = Int64(0)
        for warp in cutlass.range_constexpr(WARPS):
            total += smem.warp_masses[warp]
        if cutlass.const_expr(ranks > 1):
            if thread < ranks:
                words = smem.rank_masses.iterator + 2 * rank
                store_remote(words, thread, Int32(Uint32(total)))
                store_remote(words + 1, thread, Int32(total >> 32))
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            total = Int64(0)
            for other in cutlass.range_constexpr(ranks):
                low, high = smem.rank_masses[2 * other], smem.rank_masses[2 * other + 1]
                total += (Int64(high) << 32) + Int64(Uint32(low))
        return total

    def least_key(self, tail: Int64) -> Int32:
        """Key such that all smaller ones together have no more mass than `tail`."""
        scale = (1 - 2.0**-20) / (2.0**numbers.MASS_BITS * VECTOR * self.tiling.vectors)
        return cutlass.max(key_of(Float32(tail) * Float32(scale)), Int32(0))

    @cute.jit
    def count(self, smem: Board, p: cute.Tensor, first: Int32, digit: tuple, values: Int32) -> None:
        """Count the thread's tokens by a digit.

        Args:
            digit: its number, the digits before as a value of it, its shift, the key of equals.
            values: of the digit.
        """
        number, base, shift, key = digit
        thread = cute.arch.thread_idx()[0]
        # Vectors of values are read whole.
        for i in cutlass.range(thread, values + THREAD_VALUES - 1, THREADS, unroll=1):
            smem.counts[i] = Int32(0)
        cute.arch.sync_threads()
        is_token = number >= KEY_DIGITS
        for j in cutlass.range_constexpr(self.tiling.held):
            token = (first + j * THREADS + thread) * VECTOR
            for i in cutlass.range_constexpr(VECTOR):
                own = key_of(p[i, j])
                digits = Int32(cutlass.select_(is_token, LAST_TOKEN - token - i, own))
                value = (digits >> shift) - base
                if own >= 0 and value >= 0 and value < values and (own == key or not is_token):
                    cute.arch.atomic_add(smem.counts.iterator + value, Int32(1))

    @cute.jit
    def totals(self, smem: Board, values: Int32, rank: Int32) -> cute.Tensor:
        """Tokens of the cluster by the thread's values of a digit; thread 0 has the uppermost."""
        ranks = self.tiling.ranks
        counts = cute.make_rmem_tensor(THREAD_VALUES, Int32)
        counts.fill(0)
        lowest = PADDED - (cute.arch.thread_idx()[0] + 1) * THREAD_VALUES
        if cutlass.const_expr(ranks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if lowest >= 0 and lowest < values:
            at = cute.assume(lowest, divby=THREAD_VALUES)
            for other in cutlass.range_constexpr(ranks):
                found = load_remote(smem.counts.iterator + at, (rank + other) & (ranks - 1))
                for i in cutlass.range_constexpr(THREAD_VALUES):
                    counts[i] += found[i]
        if cutlass.const_expr(ranks > 1):
            cute.arch.cluster_arrive()
        return counts

    @cute.jit
    def drop(self, p: cute.Tensor, first: Int32, cut: Cut):
        """Make the thread's probabilities behind a cut 0."""
        for j in cutlass.range_constexpr(self.tiling.held):
            token = (first + j * THREADS + cute.arch.thread_idx()[0]) * VECTOR
            for i in cutlass.range_constexpr(VECTOR):
                is_kept = cut.keeps(key_of(p[i, j]), token + i)
                p[i, j] = Float32(cutlass.select_(is_kept, p[i, j], Float32(0.0)))


@cute.jit
def share_of(mass: Int64, top_p: Float32) -> Int64:
    """The least mass that is a share of another, at least 1."""
    exact = Float64(top_p) * Float64(mass)
    found = Int64(exact)
    if Float64(found) < exact:
        found += 1
    return cutlass.max(found, Int64(1))


@cute.jit
def sums_before(smem: Board, parts: cute.Tensor) -> tuple[Int32, Int32]:
    """Sum of the parts of the threads before this one, and of all."""
    thread = cute.arch.thread_idx()[0]
    lane, warp = thread % WARP, thread // WARP
    own = Int32(0)
    for i in cutlass.range_constexpr(THREAD_VALUES):
        own += parts[i]
    inclusive = own
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            inclusive += below
    if lane == WARP - 1:
        smem.warp_sums[warp] = inclusive
    cute.arch.sync_threads()
    before, total = inclusive - own, Int32(0)
    for other in cutlass.range_constexpr(WARPS):
        part = smem.warp_sums[other]
        before += cutlass.select_(other < warp, part, Int32(0))
        total += part
    return before, total


@cute.jit
def locate(smem: Board, counts: cute.Tensor, above: Int32, target: Int32):
    """Write down the value of a digit at which the target is reached, if the thread has it.

    Args:
        above: tokens above the thread's values.
    """
    lowest = PADDED - (cute.arch.thread_idx()[0] + 1) * THREAD_VALUES
    value, count, before = Int32(-1), Int32(0), Int32(0)
    for i in cutlass.range_constexpr(THREAD_VALUES - 1, -1, -1):
        is_here = (above < target) & (above + counts[i] >= target)
        value = Int32(cutlass.select_(is_here, lowest + i, value))
        count = Int32(cutlass.select_(is_here, counts[i], count))
        before = Int32(cutlass.select_(is_here, above, before))
        above += counts[i]
    if value >= 0:
        smem.found[0] = value
        smem.found[1] = count
        smem.found_above[0] = before
