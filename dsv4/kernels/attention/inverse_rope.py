"""Inverse rotation of an output: the table of cosines and sines, and the row of a token in it.

Neighbouring columns (x, y) become (x cos + y sin, y cos - x sin). It is linear, and the same for
all keys of a token: accumulators are rotated before they are scaled, or stored as a split's part.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.kit.kv_entry import ROPE_DIM

PAIRS = ROPE_DIM // 2


@cute.jit
def rope_row(rope: cute.Tensor, positions: cute.Tensor, token):
    """Row of the table of a token, clamped."""
    position = cutlass.Int32(0)
    if token < positions.shape[0]:
        position = positions[token]
    return cutlass.max(cutlass.min(position, cutlass.Int32(rope.shape[0]) - 1), 0)
