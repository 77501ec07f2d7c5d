"""Order of warpgroups of a CTA that would else all want the same unit at a time: turns."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

NO_RESULT = 0x7F812345  # bits of a NaN
THREADS = 256  # of the warpgroup that waits, and of the one that passes a turn


class Turns(NamedTuple):
    """Order in which some warpgroups have their turns.

    Attributes:
        first: named barrier of the first warpgroup; those of the others follow.
        groups: warpgroups.
    """

    first: int
    groups: int

    def take(self, group, values=()) -> None:
        """Wait for the warpgroup before, when some values are there."""
        own = when_there(group, values)
        cute.arch.barrier(barrier_id=self.first + own, number_of_threads=THREADS)

    def give(self, group, values=()) -> None:
        """Let the next warpgroup have its turn, when some values are there."""
        after = cutlass.select_(group == self.groups - 1, Int32(0), group + 1)
        after = when_there(after, values)
        cute.arch.barrier_arrive(barrier_id=self.first + after, number_of_threads=THREADS)


def when_there(group, values):
    """A number of a warpgroup that is known when some float32 values are."""
    for value in values:
        # No arithmetic has such a NaN, which the assembler does not know: it would move a turn
        # before them.
        is_none = value.bitcast(Int32) == NO_RESULT
        group = cutlass.select_(is_none, group + Int32(8), group)
    return group
