"""Sets of likeliest tokens: by number (top_k), and by share of the mass (top_p), exactly.

Probabilities are multiples of 2^-44, so that masses are integers, whose sums are exact in any
order. They are ordered by the bits that they have as floats, and of equals by token: a cut of this
order is found digit by digit. For each digit the CTAs of the cluster count their tokens by its
values and add up the digits behind; every CTA reads the others' counts, and all find the value at
which the number or the mass is reached. What is left to tell apart are the tokens of that value:
after two digits there is usually one.

    digit             0                1                2                    3, 4
    of the key        bits 18 and up   bits 9 to 17     bits 0 to 8          equal
    of the token                                                             bits 9 to 17, 0 to 8
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit.remote import load_remote
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
    rests: cute.Tensor  # [PADDED] int32: sums of their digits behind, without sign
    warp_counts: cute.Tensor  # [WARPS] int32
    warp_masses: cute.Tensor  # [WARPS] int64
    found: cute.Tensor  # [2] int32: value of a digit, its tokens
    found_above: cute.Tensor  # [2] int64: tokens above it, their mass


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


@cute.jit
def mass_of(key: Int32, count: Int64, rest: Int64) -> Int64:
    """Units of `count` tokens whose keys have the same exponent as `key`, and add up to count
    times its mantissa and `rest`."""
    exponent = key >> MANTISSA
    total = count * Int64((1 << MANTISSA) + (key & ((1 << MANTISSA) - 1))) + rest
    found = total
    if exponent >= MANTISSA:
        found = total << Int64(exponent - MANTISSA)
    else:
        found = total >> Int64(MANTISSA - exponent)
    return found


def allocate() -> Board:
    """The shared memory of a CTA."""
    smem = SmemAllocator()

    def tensor(count: int, dtype: type = Int32) -> cute.Tensor:
        return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    return Board(
        tensor(PADDED), tensor(PADDED), tensor(WARPS), tensor(WARPS, Int64), tensor(2),
        tensor(2, Int64),
    )  # fmt: skip


class Truncation:
    """Cuts of a row of probabilities that a cluster's threads hold."""

    def __init__(self, tiling: RowTiling):
        self.tiling = tiling

    @cute.jit
    def cut(
        self, smem: Board, p: cute.Tensor, first: Int32, top_k: Int32, top_p: Float32, rank: Int32
    ) -> Cut:
        """The cut behind the number `top_k`, or where that is 0 behind the share `top_p`; the
        thread's probabilities behind it become 0."""
        by_mass, target = top_k == 0, Int64(top_k)
        # Tokens above those that the digits so far leave, and their mass.
        above, mass = Int32(0), Int64(0)
        key, token = Int32(0), Int32(LAST_TOKEN)
        number, base = Int32(0), Int32(0)
        while number < DIGITS:
            shift = Int32(0)
            if number == 0:
                shift = Int32(FIRST_SHIFT)
            elif number != KEY_DIGITS - 1 and number != DIGITS - 1:
                shift = Int32(SHIFT)
            self.count(smem, p, first, (number, base, shift, key))
            counts, masses = self.totals(smem, rank, base, shift)
            before, mass_before, all_counts, all_mass = sums_before(smem, counts, masses)
            if cutlass.const_expr(self.tiling.ranks > 1):
                # The others have read this CTA's counts.
                cute.arch.cluster_wait()
            if number == 0 and by_mass:
                target = share_of(all_mass, top_p)
            if number == 0 and not by_mass and all_counts <= top_k:
                number = Int32(DIGITS)  # all are kept
            else:
                place = above + before, mass + mass_before
                locate(smem, counts, masses, place, by_mass, target)
                cute.arch.sync_threads()
                value, there = base + smem.found[0], smem.found[1]
                above, mass = Int32(smem.found_above[0]), smem.found_above[1]
                if number < KEY_DIGITS:
                    key = value << shift
                else:
                    token = LAST_TOKEN - (value << shift)
                base = value << SHIFT
                left = target - Int64(above)
                if number == KEY_DIGITS - 1 and by_mass:
                    # Of equals so many that the last one begins below the share.
                    each = mass_of(key, Int64(1), Int64(0))
                    left = (target - mass + each - 1) // each
                if number == KEY_DIGITS - 1:
                    by_mass, target = Boolean(False), left
                    base, above = Int32(0), Int32(0)
                # All of these tokens are kept: what follows would tell them apart in vain.
                if there == 1 or (not by_mass and Int64(there) == left):
                    number = Int32(DIGITS)
                number += 1
        self.drop(p, first, Cut(key, token))
        return Cut(key, token)

    @cute.jit
    def count(self, smem: Board, p: cute.Tensor, first: Int32, digit: tuple):
        """Count the thread's tokens by a digit, and add up what is behind it."""
        number, base, shift, key = digit
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range(thread, PADDED, THREADS, unroll=1):
            smem.counts[i] = Int32(0)
            smem.rests[i] = Int32(0)
        cute.arch.sync_threads()
        values, is_token = Int32(VALUES), number >= KEY_DIGITS
        if number == 0:
            values = Int32(FIRST_VALUES)
        for j in cutlass.range_constexpr(self.tiling.held):
            token = (first + j * THREADS + thread) * VECTOR
            for i in cutlass.range_constexpr(VECTOR):
                own = key_of(p[i, j])
                digits = Int32(cutlass.select_(is_token, LAST_TOKEN - token - i, own))
                value = (digits >> shift) - base
                if own >= 0 and value >= 0 and value < values and (own == key or not is_token):
                    cute.arch.atomic_add(smem.counts.iterator + value, Int32(1))
                    rest = digits & ((Int32(1) << shift) - 1)
                    cute.arch.atomic_add(smem.rests.iterator + value, rest)

    @cute.jit
    def totals(
        self, smem: Board, rank: Int32, base: Int32, shift: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Tokens of the cluster, and their masses, by the thread's values of a digit; thread 0 has
        the uppermost ones."""
        ranks = self.tiling.ranks
        counts = cute.make_rmem_tensor(THREAD_VALUES, Int32)
        rests = cute.make_rmem_tensor(THREAD_VALUES, Int64)
        counts.fill(0)
        rests.fill(0)
        lowest = PADDED - (cute.arch.thread_idx()[0] + 1) * THREAD_VALUES
        if cutlass.const_expr(ranks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if lowest >= 0:
            for other in cutlass.range_constexpr(ranks):
                source = (rank + other) % ranks
                at = cute.assume(lowest, divby=THREAD_VALUES)
                found = load_remote(smem.counts.iterator + at, source)
                behind = load_remote(smem.rests.iterator + at, source)
                for i in cutlass.range_constexpr(THREAD_VALUES):
                    counts[i] += found[i]
                    rests[i] += Int64(Uint32(behind[i]))
        if cutlass.const_expr(ranks > 1):
            cute.arch.cluster_arrive()
        masses = cute.make_rmem_tensor(THREAD_VALUES, Int64)
        for i in cutlass.range_constexpr(THREAD_VALUES):
            masses[i] = mass_of((base + lowest + i) << shift, Int64(counts[i]), rests[i])
        return counts, masses

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
def sums_before(smem: Board, counts: cute.Tensor, masses: cute.Tensor) -> tuple:
    """Tokens and mass of the threads before this one, and of all."""
    thread = cute.arch.thread_idx()[0]
    lane, warp = thread % WARP, thread // WARP
    own, mass = Int32(0), Int64(0)
    for i in cutlass.range_constexpr(THREAD_VALUES):
        own += counts[i]
        mass += masses[i]
    count_here, mass_here = own, mass
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(count_here, 1 << step, mask_and_clamp=0)
        mass_below = cute.arch.shuffle_sync_up(mass_here, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            count_here += below
            mass_here += mass_below
    if lane == WARP - 1:
        smem.warp_counts[warp] = count_here
        smem.warp_masses[warp] = mass_here
    cute.arch.sync_threads()
    before, mass_before = count_here - own, mass_here - mass
    all_counts, all_mass = Int32(0), Int64(0)
    for other in cutlass.range_constexpr(WARPS):
        part, mass_part = smem.warp_counts[other], smem.warp_masses[other]
        if other < warp:
            before += part
            mass_before += mass_part
        all_counts += part
        all_mass += mass_part
    return before, mass_before, all_counts, all_mass


@cute.jit
def locate(
    smem: Board, counts: cute.Tensor, masses: cute.Tensor, place: tuple, by_mass: Boolean,
    target: Int64,
):  # fmt: skip
    """Write down the value of a digit at which a number or mass is reached, if the thread has it.

    Args:
        place: tokens above the thread's values, and their mass.
    """
    above, mass = place
    lowest = PADDED - (cute.arch.thread_idx()[0] + 1) * THREAD_VALUES
    for i in cutlass.range_constexpr(THREAD_VALUES - 1, -1, -1):
        before = Int64(cutlass.select_(by_mass, mass, Int64(above)))
        part = Int64(cutlass.select_(by_mass, masses[i], Int64(counts[i])))
        if before < target and before + part >= target:
            smem.found[0] = lowest + i
            smem.found[1] = counts[i]
            smem.found_above[0] = Int64(above)
            smem.found_above[1] = mass
        above += counts[i]
        mass += masses[i]
