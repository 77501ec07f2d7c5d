"""Operands of launches with several weights, of any architecture: outputs and scales of the weight
that a tile belongs to, and the clusters of each kind of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, cute

from dsv4.kernels.gemm.epilogues import HeadEpilogue, IndexRounding


class HeadOperands(NamedTuple):
    """Tensors of the epilogues of heads of one launch."""

    rope: cute.Tensor  # [R, 64] fp32, cosines, then sines, per position
    positions: cute.Tensor  # [T] int32
    squares: tuple[cute.Tensor, ...]  # [T, H, N] fp32 of each weight, written; or [0, H, N]
    scales: tuple[cute.Tensor, ...] = ()  # [T, H] fp32 of each weight, written, where one has codes


def head_operands(
    epilogues: Sequence[HeadEpilogue | None], rope: cute.Tensor, positions: cute.Tensor,
    squares: tuple[cute.Tensor, ...], scales: tuple[cute.Tensor, ...],
) -> tuple[HeadOperands, ...]:  # fmt: skip
    """Those of a launch, where it has such an epilogue."""
    if not any(epilogues):
        return ()
    has_codes = any(isinstance(epilogue, IndexRounding) for epilogue in epilogues)
    return (HeadOperands(rope, positions, squares, scales if has_codes else ()),)


def table_row(rope: cute.Tensor, position: Int32) -> Int32:
    """Row of a position, clamped."""
    return cutlass.max(cutlass.min(position, Int32(rope.shape[0]) - 1), Int32(0))


class OutputTile(NamedTuple):
    """Coordinates of an output tile.

    Attributes:
        weight: index among those of its kind, static where there is one.
        row_tile: of the weight.
    """

    weight: Int32 | int
    row_tile: Int32
    token_tile: Int32


def output_tile(first_tiles: tuple[Int32, ...], row_tile: Int32, token_tile: Int32) -> OutputTile:
    """A tile by its row tile among those of all weights, one behind the other.

    Args:
        first_tiles: first row tile of each weight but the first.
    """
    weight, row = 0, row_tile
    for i, first in enumerate(first_tiles, 1):
        is_here = row_tile >= first
        weight = Int32(cutlass.select_(is_here, Int32(i), Int32(weight)))
        row = Int32(cutlass.select_(is_here, row_tile - first, row))
    return OutputTile(weight, row, token_tile)


def first_x_block(plan, tile: OutputTile) -> Int32 | int:
    """k block of x that the first one of a tile's rows is multiplied with."""
    if not plan.group_rows:
        return 0
    return tile.row_tile * plan.rows // plan.group_rows * plan.row_blocks


def chosen(values, index: Int32 | int):
    """The value at an index that is known at run time."""
    result = values[0]
    for i in range(1, len(values)):
        result = type(result)(cutlass.select_(index == i, values[i], result))
    return result


def chosen_matrix(matrices: tuple[cute.Tensor, ...], index: Int32 | int, dtype) -> cute.Tensor:
    """The matrix at an index, seen as one of `dtype`."""
    if len(matrices) == 1:
        return matrices[0]
    address = chosen([matrix.iterator.toint() for matrix in matrices], index)
    rows, columns, stride = (
        chosen([value(matrix) for matrix in matrices], index)
        for value in (
            lambda matrix: Int32(matrix.shape[0]),
            lambda matrix: Int32(matrix.shape[1]),
            lambda matrix: Int64(matrix.stride[0]),
        )
    )
    start = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(start, cute.make_layout((rows, columns), stride=(stride, 1)))


def outputs_by_dtype(ys: tuple[cute.Tensor, ...], weight) -> list:
    """Each dtype among the outputs that are no codes, and whether that of a weight has it."""
    dtypes = [y.element_type for y in ys]
    stored = set(dtypes) - {Float8E4M3FN}
    if len(stored) < 2:
        return [(dtype, True) for dtype in stored]
    is_wide = chosen([Boolean(dtype is Float32) for dtype in dtypes], weight)
    return [(Float32, is_wide), (BFloat16, is_wide ^ True)]


def clusters_of_kinds(tiles: list[Int32], row_bytes: list[int], resident: Int32) -> list[Int32]:
    """Clusters of each of one or two kinds of weights: one a tile, or as many as are resident at
    once by their bytes.

    Args:
        tiles: of outputs, of each kind.
        row_bytes: of an element of a row of a weight.
        resident: clusters that run at once.
    """
    if len(tiles) == 1:
        return [cutlass.max(cutlass.min(tiles[0], resident), 1)]
    first, second = tiles
    whole = first * row_bytes[0] + second * row_bytes[1]
    share = (resident * first * row_bytes[0] + whole // 2) // cutlass.max(whole, 1)
    share = cutlass.max(cutlass.min(share, cutlass.min(first, resident - 1)), 1)
    fits = first + second <= resident
    rest = cutlass.max(cutlass.min(second, resident - share), 1)
    pairs = (first, share), (second, rest)
    return [Int32(cutlass.select_(fits, *pair)) for pair in pairs]
