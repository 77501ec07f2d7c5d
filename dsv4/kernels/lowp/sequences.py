"""Packed sequences on a device: to which one a block of rows belongs, where its rows lie, their
loads.

Ends that do not rise, or lie outside the tensor, give sequences of fewer rows: nothing is read that
is not there.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dsv4.kernels.kit.vectors import address_of, vector_at
from dsv4.kernels.lowp.groups import first_block

VECTOR = 8  # channels of a load


class Rows(NamedTuple):
    """Rows of a sequence: number of the sequence, first row, count."""

    sequence: Int32
    first: Int32
    count: Int32


class Tile(NamedTuple):
    """A tile of rows: its sequence, the first row in the tensor, rows that there are."""

    sequence: Int32
    first: Int32
    rows: Int32


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


@cute.jit
def tile_of_rows(
    ends: cute.Tensor, size, batch, number, rows: cutlass.Constexpr, is_varlen: cutlass.Constexpr
) -> Tile:
    """A tile of so many rows of a tensor of `size`; none of one between sequences."""
    found, place = Rows(Int32(batch), Int32(0), Int32(size)), Int32(number)
    if cutlass.const_expr(is_varlen):
        last = Int32(ends.shape[0]) - 2
        sequence = cutlass.min(sequence_of(ends, number, rows), last)
        found = rows_of(ends, sequence, size)
        place = cutlass.max(number - first_block(found.first, sequence, rows), 0)
    first = place * rows
    count = cutlass.max(cutlass.min(found.count - first, rows), 0)
    return Tile(found.sequence, found.first + first, Int32(count))


@cute.jit
def load_rows(tensor: cute.Tensor, tile: Tile, batch, head, channel, rows, dim: cutlass.Constexpr):
    """Eight channels from `channel` on of some rows of a tile [8, i], all loads in flight at a
    time; zeros where there is no row, or no channel of `dim`."""
    found = cute.make_rmem_tensor((VECTOR, len(rows)), tensor.element_type)
    words = cute.recast_tensor(found, Uint32)
    words.fill(0)
    if tile.rows > 0 and channel < dim:
        strides = tensor.stride
        start = Int64(batch) * strides[0] + Int64(head) * strides[1] + channel
        for i in cutlass.range_constexpr(len(rows)):
            row = cutlass.min(rows[i], tile.rows - 1)
            offset = start + Int64(tile.first + row) * strides[2]
            source = vector_at(address_of(tensor, offset), tensor.element_type, 0)
            cute.autovec_copy(source, found[None, i])
        for i in cutlass.range_constexpr(len(rows)):
            for j in cutlass.range_constexpr(VECTOR // 2):
                words[j, i] = cutlass.select_(rows[i] < tile.rows, words[j, i], Uint32(0))
    return found
