"""Granules of shadow memory that an access touches; shadow.py says what a granule is."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsv4.simulator.instructions.operands.descriptors import MatrixDescriptor, element_index
from dsv4.simulator.instructions.operands.tensor_core import Multiplication, operand_columns
from dsv4.simulator.machine.memory import TMEM_LANES

TMEM_GROUPS = 8  # groups of 16 lanes
_ALL_GROUPS = tuple(range(TMEM_GROUPS))


def granules(offsets: np.ndarray, size: int) -> np.ndarray:
    """4-byte granules of `size` bytes at each offset."""
    first = np.asarray(offsets, np.int64) >> 2
    if size <= 4:
        return first
    return (first[:, None] + np.arange(size // 4)).reshape(-1)


@lru_cache(maxsize=1024)
def tile_granules(
    descriptor: MatrixDescriptor, rows: int, depth: int, size: int, k_major: bool
) -> np.ndarray:
    """Granules of shared memory that an operand tile occupies."""
    index = element_index(descriptor, rows, depth, size, k_major)
    return np.unique(index * size >> 2)


@lru_cache(maxsize=256)
def column_granules(column: int, count: int, groups: tuple[int, ...]) -> np.ndarray:
    """TMEM granules of `count` columns, in the given groups of 16 lanes."""
    columns = np.arange(column, column + count)[:, None] * TMEM_GROUPS
    return (columns + np.array(groups)).reshape(-1)


def accumulator_granules(product: Multiplication) -> np.ndarray:
    """TMEM granules of an accumulator."""
    columns = product.form.n // product.copies
    return column_granules(product.d & 0xFFFF, columns, _groups(product.lanes()))


def tmem_operand_granules(product: Multiplication) -> np.ndarray:
    """TMEM granules of operand A there: of its rows, which may leave half of the lanes out."""
    columns = operand_columns(product.form.depth, product.form.a)
    return column_granules(product.a & 0xFFFF, columns, _groups(product.operand_lanes()))


def _groups(lanes: np.ndarray) -> tuple[int, ...]:
    """Groups of 16 lanes."""
    if len(lanes) == TMEM_LANES:
        return _ALL_GROUPS
    return tuple(np.unique(lanes // 16).tolist())
