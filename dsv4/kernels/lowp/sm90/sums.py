"""Accumulators of weighted values in a thread's registers, of float32 or fp16."""

from __future__ import annotations

from cutlass import Float16, Float32, Uint32, cute

from dsv4.kernels.kit.wgmma import by_row
from dsv4.kernels.lowp.rounding import pack_half, unpack_half


class Sums:
    """An accumulator by row and group of eight columns, of which a thread has a pair each.

    One of fp16 is read and written by words: halves would be taken from its registers where the
    product is issued, not where it is waited for.
    """

    def __init__(self, fragment: cute.Tensor):
        self.is_half = fragment.element_type is Float16
        self.rows = None if self.is_half else by_row(fragment)
        self.words = cute.recast_tensor(fragment, Uint32) if self.is_half else None
        self.groups = cute.size(fragment) // 4

    def pair(self, r: int, j: int) -> list[Float32]:
        """Two sums."""
        if self.is_half:
            return list(unpack_half(self.words[2 * j + r]))
        return [self.rows[r, c, j] for c in range(2)]

    def set_pair(self, r: int, j: int, values) -> None:
        """Replace two sums."""
        if self.is_half:
            self.words[2 * j + r] = pack_half(*values)
            return
        for c in range(2):
            self.rows[r, c, j] = values[c]

    def wide(self) -> cute.Tensor:
        """All of them as float32."""
        if not self.is_half:
            return self.rows
        found = cute.make_rmem_tensor(
            cute.make_layout((2, 2, self.groups), stride=(2, 1, 4)), Float32
        )
        for j in range(self.groups):
            for r in range(2):
                for c, x in enumerate(self.pair(r, j)):
                    found[r, c, j] = x
        return found
