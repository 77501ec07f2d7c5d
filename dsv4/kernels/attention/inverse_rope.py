"""Inverse rotation of an output by the table of cosines and sines, whose row is a token's position.

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


def rotation(rope: cute.Tensor, row, pair) -> tuple:
    """Cosine and sine of a pair of columns."""
    return rope[row, pair], rope[row, pair + PAIRS]


def rotate_back(x, y, angle: tuple) -> tuple:
    """Two neighbouring columns, rotated by a `rotation`."""
    cosine, sine = angle
    return x * cosine + y * sine, y * cosine - x * sine
