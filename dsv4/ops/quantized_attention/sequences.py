"""Packed sequences: where each one's rows, tiles and statistics lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from dsv4.kernels.lowp.groups import first_block, num_blocks


class Sequence(NamedTuple):
    """One of the packed sequences: its number, rows, and tiles."""

    number: int
    rows: slice
    tiles: slice

    @property
    def length(self) -> int:
        """Rows."""
        return self.rows.stop - self.rows.start


def sequences_of(ends: Tensor, block: int) -> Iterator[Sequence]:
    """Sequences of cumulated lengths [N + 1] int32, in tiles of `block` rows. Synchronises."""
    bounds = ends.tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        first = first_block(begin, number, block)
        tiles = slice(first, first + num_blocks(end - begin, block))
        yield Sequence(number, slice(begin, end), tiles)


def check_ends(name: str, ends: Tensor, rows: int) -> None:
    """Refuse cumulated lengths that do not rise from 0 to at most `rows`: ValueError."""
    bounds = ends.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > rows:
        shown = ", ".join(map(str, bounds[:8])) + (", ..." if len(bounds) > 8 else "")
        raise ValueError(f"{name}: got [{shown}], needs ends that rise from 0 to at most {rows}")


def check_count(name: str, ends: Tensor) -> None:
    """Refuse cumulated lengths of no sequence: ValueError."""
    if not len(ends):
        raise ValueError(f"{name}: got no elements, needs the ends of N sequences, N + 1 of them")
