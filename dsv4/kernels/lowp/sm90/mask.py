"""Mask of a call: which keys of a tile each row sees, or what is added to its scores.

Rows are read from global memory as they are, an element at a time: they start anywhere, and a
dimension may be one that is repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.kit.wgmma import by_row
from dsv4.kernels.lowp.config import LOG2E
from dsv4.kernels.lowp.work import Operands, Work, row_of


class MaskRows(NamedTuple):
    """Places of a thread's two rows in the mask: their first elements, and the last one of a row
    that there is."""

    first: Int64
    second: Int64
    last: Int32

    @staticmethod
    def of(operands: Operands, work: Work, row) -> MaskRows:
        """Those of a row of a work tile and the one 8 below; the last row in place of one that is
        not there."""
        mask = operands.attn_mask
        rows = [work.first_row + cutlass.min(row + 8 * r, work.rows - 1) for r in range(2)]
        places = [address_of(mask, row_of(mask, work.batch, work.head, x)) for x in rows]
        return MaskRows(*places, work.keys - 1)


@cute.jit
def apply_mask(scores: cute.Tensor, mask: cute.Tensor, rows: MaskRows, factors, limits, tile, lane):
    """Replace a tile's sums of products by scores in units of log2, with what the mask adds to
    them; -inf of keys that a row does not see.

    Args:
        mask: uint8, other than 0 where a key is seen, or float32 that is added.
        factors: on sums, by row and by the part of the columns.
        limits: keys of the tile that each row sees otherwise.
    """
    sums, found = by_row(scores), by_row(cute.recast_tensor(scores, Float32))
    groups, dtype = cute.size(sums, mode=[2]), mask.element_type
    size, parts = dtype.width // 8, len(factors[0])
    begin = tile * (8 * groups)
    for r in cutlass.range_constexpr(2):
        address = rows.first if r == 0 else rows.second
        for j in cutlass.range_constexpr(groups):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + c + lane % 4 * 2
                at = cutlass.min(begin + column, rows.last)
                value = pointer_to(address + Int64(at) * size, dtype, size).load()
                is_seen, score = column < limits[r], Float32(sums[r, c, j])
                factor = factors[r][j * parts // groups]
                if cutlass.const_expr(dtype is Float32):
                    score = cute.math.fma(score, factor, value * Float32(LOG2E))
                else:
                    score, is_seen = score * factor, is_seen and value != 0
                found[r, c, j] = cutlass.select_(is_seen, Float32(score), -Float32.inf)
