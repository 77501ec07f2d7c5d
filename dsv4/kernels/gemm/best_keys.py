"""Keys of outputs whose largest is looked for, of any architecture.

An output is a key, ordered as the values are and below them by descending rows, so that the largest
key is that of the first row with the largest value. Maxima are exact in any order. Zeros are below
all keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.gemm.epilogues import COUNTER_WORDS, KEY_WORDS
from dsv4.kernels.kit.pointers import pointer_at

ROW_BITS = 31
LAST_ROW = (1 << ROW_BITS) - 1
INFINITY = 0x7F800000  # in fp32
# Upper parts of keys.
NO_VALUE, INFINITY_BELOW, NAN = 0, 0x007FFFFF, 0xFFFFFFFF
FAILED = -1


class BestOperands(NamedTuple):
    """Tensors of the epilogue."""

    rows: cute.Tensor  # [T] int64, written: the row of the largest output, or -1
    workspace: cute.Tensor  # zeros

    def key(self, token) -> cute.Pointer:
        """That of a token."""
        base = cute.recast_ptr(self.workspace.iterator, dtype=Int64)
        return pointer_at(base, Int64(COUNTER_WORDS // KEY_WORDS) + token, Int64, align=8)


def ordered(value: Float32) -> Uint32:
    """Bits that are ordered as values are; NaN above all others, and both zeros the same."""
    bits = value.bitcast(Int32)
    magnitude = bits & Int32(0x7FFFFFFF)
    bits = Int32(cutlass.select_(magnitude == 0, Int32(0), bits))
    ordered = Uint32(bits ^ (bits >> 31 | Int32(-(2**31))))
    return Uint32(cutlass.select_(magnitude > Int32(INFINITY), Uint32(NAN), ordered))


def or_none(condition, value: Uint32) -> Uint32:
    return Uint32(cutlass.select_(condition, value, Uint32(NO_VALUE)))


def key_of(value: Uint32, row: Int32) -> Int64:
    return Int64(value) << ROW_BITS | Int64(Int32(LAST_ROW) - row)


@cute.jit
def row_of(key: Int64) -> Int64:
    """Row of a key; `FAILED` for NaN and minus infinity."""
    value = key >> ROW_BITS
    row = Int64(LAST_ROW) - (key & LAST_ROW)
    has_failed = (value == NAN) | (value <= INFINITY_BELOW)
    return Int64(cutlass.select_(has_failed, Int64(FAILED), row))
