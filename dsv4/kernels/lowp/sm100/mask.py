"""Mask of a call: which keys of a tile a row sees, or what is added to its scores.

A thread reads its row as it is, an element at a time: rows start anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.config import LOG2E
from dsv4.kernels.lowp.sm100.softmax import CHUNK, part_of
from dsv4.kernels.lowp.work import Operands, Work, row_of


class MaskRow(NamedTuple):
    """Place of a row in the mask: its first element, and the last key."""

    first: Int64
    last: Int32

    @staticmethod
    def of(operands: Operands, work: Work, row) -> MaskRow:
        """That of a row of a work tile; the last one in place of one that is not there."""
        mask = operands.attn_mask
        at = work.first_row + cutlass.max(cutlass.min(row, work.rows - 1), 0)
        place = row_of(mask, work.batch, work.head, at)
        return MaskRow(address_of(mask, place), work.keys - 1)


@cute.jit
def masked(
    products: cute.Tensor, mask: cute.Tensor, row: MaskRow, factors, limit, tile
) -> cute.Tensor:
    """Scores of a tile in units of log2, with what the mask adds to them; -inf of keys that the row
    does not see.

    Args:
        mask: uint8, other than 0 where a key is seen, or float32 that is added.
        factors: on products, by the part of the tile's keys.
        limit: keys of the tile that the row sees otherwise.
    """
    keys, dtype = cute.size(products), mask.element_type
    scores = cute.make_rmem_tensor(keys, Float32)
    size, parts = dtype.width // 8, len(factors)
    for first in cutlass.range_constexpr(0, keys, CHUNK):
        for i in cutlass.range_constexpr(first, first + CHUNK):
            at = cutlass.min(tile * keys + i, row.last)
            value = pointer_to(row.first + Int64(at) * size, dtype, size).load()
            is_seen, factor = i < limit, factors[part_of(i, parts)]
            score = Float32(products[i])
            if cutlass.const_expr(dtype is Float32):
                score = cute.math.fma(score, factor, value * Float32(LOG2E))
            else:
                score, is_seen = score * factor, is_seen and value != 0
            scores[i] = cutlass.select_(is_seen, Float32(score), -Float32.inf)
    return scores
