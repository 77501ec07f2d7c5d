"""Parameters of `cuTensorMapEncodeTiled`, right and wrong, and what came of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.simulator.hardware.inputs import random_words

COUNT = 6000
_DIMENSIONS = 5
_SIZES = (1, 8, 16, 37, 40, 64, 100, 128, 256, 1 << 20, 1 << 32, (1 << 32) + 1, 0)
_STRIDES = (0, 8, 16, 24, 48, 160, 1 << 20, (1 << 40) - 32, 1 << 40, *range(32, 2048, 32))
_BOXES = (1, 2, 3, 4, 8, 8, 16, 16, 16, 24, 32, 32, 32, 64, 64, 128, 256, 257, 0)
_STEPS = (*[1] * 40, 2, 2, 3, 8, 9, 0)
_ADDRESSES = (*[0x7F0000000000] * 12, 0x7F0000000010, 0x7F0000000008)
_TYPES = 13  # those of sm_90


class Encoding(NamedTuple):
    """Arguments of one call, innermost dimension first; the enumerators' numbers."""

    dtype: int
    rank: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: int
    swizzle: int
    promotion: int
    fill: int


def encodings() -> list[Encoding]:
    """Seeded calls; about one in twelve is right."""
    columns = 4 * _DIMENSIONS + 7
    words = random_words("tensor map encodings", COUNT * columns).reshape(COUNT, columns).tolist()
    tables = [t for t in (_SIZES, _STRIDES, _BOXES, _STEPS) for _ in range(_DIMENSIONS)]
    out = []
    for row in words:
        dtype, rank, address, interleave, swizzle, promotion, fill, *rest = row
        values = [table[word % len(table)] for table, word in zip(tables, rest)]
        lists = [tuple(values[k : k + _DIMENSIONS]) for k in range(0, len(values), _DIMENSIONS)]
        out.append(
            Encoding(
                dtype % _TYPES,
                rank % 5 + 1,
                _ADDRESSES[address % len(_ADDRESSES)],
                *lists,
                interleave % 3,
                swizzle % 4,
                promotion % 4,
                int(fill % 4 == 0),
            )
        )
    return out


def outcomes(encode: Callable[[Encoding], Sequence[int] | None]) -> dict[str, int | str]:
    """How many calls were accepted, and a digest of which ones and of the maps' words.

    Args: `encode` gives the words of a map, None for a call that is refused.
    """
    digest, accepted = hashlib.blake2b(digest_size=16), 0
    for encoding in encodings():
        words = encode(encoding)
        accepted += words is not None
        digest.update(b"no" if words is None else np.array(words, "<u8").tobytes())
    return {"calls": COUNT, "accepted": accepted, "digest": digest.hexdigest()}
