"""The 4-byte cells of global memory that a copy touches: (address, offsets in cells)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsv4.simulator.instructions.operands.tensor_map import TensorMap

Footprint = tuple[int, np.ndarray]


def tensor_footprint(m: TensorMap, mode: str, origin: list[int]) -> Footprint:
    """Of a box, or of the four rows of gather4 and scatter4; parts outside the tensor touch
    nothing."""
    if mode == "tile":
        return _box(m, m.in_bytes(origin))
    parts = [_box(m, m.in_bytes((origin[0], row))) for row in origin[1:]]
    first = min(address for address, _ in parts)
    return first, np.concatenate([cells + (address - first >> 2) for address, cells in parts])


def run_footprint(address: int, size: int) -> Footprint:
    """Of consecutive bytes."""
    return address & ~3, _run(-(-(size + address % 4) // 4))


@lru_cache(maxsize=256)
def _run(count: int) -> np.ndarray:
    return np.arange(count)


def _box(m: TensorMap, origin) -> Footprint:
    slices = m.slices(origin, m.dims)
    if slices is None:
        return m.address & ~3, _run(0)
    inside = tuple(reversed(slices[0]))  # innermost first
    address = m.address + sum(s.start * stride for s, stride in zip(inside, m.strides))
    shape = tuple(-(-(s.stop - s.start) // s.step) for s in inside)
    steps = tuple(stride * s.step for s, stride in zip(inside, m.strides))
    return address & ~3, _grid(shape, steps, m.element, address & 3)


@lru_cache(maxsize=512)
def _grid(shape: tuple[int, ...], steps: tuple[int, ...], element: int, shift: int) -> np.ndarray:
    """Cells of a grid of elements, from the cell of the first, which starts `shift` bytes in it."""
    if steps[0] == element:
        offsets = np.arange(shift & ~3, shift + shape[0] * element, 4)
    else:
        size = np.arange(0, element, 4)
        offsets = (np.arange(shape[0])[:, None] * steps[0] + shift + size).reshape(-1)
    for count, step in zip(shape[1:], steps[1:]):
        offsets = (np.arange(count)[:, None] * step + offsets).reshape(-1)
    return np.unique(offsets >> 2)
