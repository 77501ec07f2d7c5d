"""Packed sequences on a device: to which one a block of rows belongs, and where its rows lie.

Ends that do not rise, or lie outside the tensor, give sequences of fewer rows: nothing is read that
is not there.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.lowp.groups import first_block


class Rows(NamedTuple):
    """Rows of a sequence: number of the sequence, first row, count."""

    sequence: Int32
    first: Int32
    count: Int32


@cute.jit
def sequence_of(ends: cute.Tensor, block, size: cutlass.Constexpr) -> Int32:
    """The sequence that a block of `size` rows belongs to; their number for blocks behind them."""
    low, high = Int32(0), Int32(ends.shape[0]) - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_here = first_block(ends[middle], middle, size) <= block
        low = cutlass.select_(is_here, middle, low)
        high = cutlass.select_(is_here, high, middle - 1)
    return low


@cute.jit
def rows_of(ends: cute.Tensor, sequence, size) -> Rows:
    """Rows of a sequence in a tensor of `size` rows; behind the last one, those that are left."""
    begin, end = ends[sequence], Int32(size)
    if sequence < ends.shape[0] - 1:
        end = ends[sequence + 1]
    begin = cutlass.max(cutlass.min(begin, Int32(size)), 0)
    end = cutlass.max(cutlass.min(end, Int32(size)), begin)
    return Rows(Int32(sequence), begin, end - begin)
