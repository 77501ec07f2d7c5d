"""Names of places in a kernel's shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Allocation(NamedTuple):
    """Dynamic shared memory that a kernel's source allocates.

    Attributes:
        name: what it is called, unless it has `fields`: (name, bytes, offset) of each.
        size, alignment: in bytes.
    """

    name: str
    size: int
    alignment: int
    fields: tuple[tuple[str, int, int], ...] = ()


class SharedNames:
    """Named ranges of a CTA's shared memory, by offset from the start of its window."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, str]] = []

    def add(self, start: int, size: int, name: str) -> None:
        """Name the bytes [start, start + size)."""
        self.ranges.append((start, start + size, name))

    def add_allocations(self, start: int, allocations: Iterable[Allocation]) -> None:
        """Name what is allocated one behind the other from `start` on."""
        for found in allocations:
            start = -(-start // found.alignment) * found.alignment
            for name, size, offset in found.fields or ((found.name, found.size, 0),):
                self.add(start + offset, size, name)
            start += found.size

    def place(self, offset: int) -> str:
        """An offset for people, with the name of what lies there where that is known."""
        for start, stop, name in self.ranges:
            if start <= offset < stop:
                inside = f" + {offset - start:#x}" if offset > start else ""
                return f"{name}{inside} (offset {offset:#x})"
        return f"offset {offset:#x}"
