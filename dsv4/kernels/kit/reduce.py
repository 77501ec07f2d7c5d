"""Reductions: of the values of a thread, and over lanes that hold the same row or column."""

import cutlass
from cutlass import cute


def tree(operation, values):
    """Reduce a list pairwise: the dependent chain is as short as it can be."""
    while len(values) > 1:
        pairs = [operation(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def largest(values):
    """The largest of integers: the machine compares three at a time."""
    while len(values) > 2:
        whole = len(values) // 3 * 3
        triples = zip(*(values[i:whole:3] for i in range(3)))
        values = [cutlass.max(cutlass.max(a, b), c) for a, b, c in triples] + values[whole:]
    return values[0] if len(values) == 1 else cutlass.max(*values)


@cute.jit
def quad_max(x: cutlass.Float32) -> cutlass.Float32:
    """Maximum over the four lanes that hold a row of an accumulator fragment."""
    return cute.arch.warp_reduction_max(x, threads_in_group=4)


@cute.jit
def quad_sum(x: cutlass.Float32) -> cutlass.Float32:
    """Sum over the four lanes that hold a row of an accumulator fragment."""
    return cute.arch.warp_reduction_sum(x, threads_in_group=4)


def across_quads(operation, x: cutlass.Float32) -> cutlass.Float32:
    """Reduce over the eight lanes of a warp that hold the same columns of a fragment."""
    for offset in (4, 8, 16):
        x = operation(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def spread_sums(terms, lane, offsets=(16, 8, 4, 2, 1)):
    """Sums over the lanes of a warp of many terms, spread over the lanes.

    With n terms about n shuffles rather than 5 n: at each step a lane keeps one half of its terms.
    The additions of a sum are those of a butterfly, whatever the number of terms.

    Args:
        terms: list of fp32, those of a lane.
        offsets: of the lanes that are added, bit by bit from above; of all lanes of the warp.

    Returns:
        The first sum's index of this lane, its sums, and how many lanes have the same, those that
        differ in the last bits. Indices past the terms are padding.
    """
    zero, count = cutlass.Float32(0.0), len(terms)
    values = list(terms)
    if count > 1 << len(offsets):
        values += [zero] * (_power_of_two(count) - count)
    index, copies = cutlass.Int32(0), 1
    first, whole = index, 0  # from where on, and of how many terms, there is padding
    for offset in offsets:
        if len(values) == 1:
            values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=offset)]
            copies *= 2
            continue
        if len(values) % 2:
            first, whole = index, len(values)
            values += [zero] * (_power_of_two(whole) - whole)
        half = len(values) // 2
        is_high = lane & offset != 0
        pairs = list(zip(values[:half], values[half:]))
        kept = [cutlass.select_(is_high, high, low) for low, high in pairs]
        sent = [cutlass.select_(is_high, low, high) for low, high in pairs]
        received = [cute.arch.shuffle_sync_bfly(value, offset=offset) for value in sent]
        values = [a + b for a, b in zip(kept, received)]
        index += cutlass.select_(is_high, cutlass.Int32(half), cutlass.Int32(0))
    if whole:
        index = cutlass.select_(index - first < whole, index, cutlass.Int32(count))
    return index, values, copies


def _power_of_two(count: int) -> int:
    """The next one, or the number itself."""
    return 1 << (count - 1).bit_length()
