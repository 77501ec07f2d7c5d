"""Which work items a CTA of the Hopper kernel goes through, and how many CTAs there are."""

from typing import NamedTuple

import cutlass
from cutlass import cute

# Rounds of tiles after which multiprocessors are so uneven that the last tiles are dealt out late.
MIN_ROUNDS = 6


class Turns(NamedTuple):
    """Every CTA takes what is a whole number of grids after its first work item."""

    works: cutlass.Int32

    def of_cta(self, cta):
        """First work item, end of the items, and their distance."""
        return cta, self.works, cute.arch.grid_dim()[0]


class Rounds(NamedTuple):
    """Whole rounds as in `Turns`; each work item beyond them may have a CTA of its own."""

    ctas: cutlass.Int32  # that take part in the rounds
    regular_works: cutlass.Int32  # of all rounds

    def of_cta(self, cta):
        """First work item, end of the items, and their distance."""
        is_single = cta >= self.ctas
        single = self.regular_works + cta - self.ctas
        first = cutlass.select_(is_single, cutlass.Int32(single), cutlass.Int32(cta))
        stop = cutlass.select_(is_single, cutlass.Int32(single + 1), self.regular_works)
        return first, stop, self.ctas

    def grid(self, works: cutlass.Int32):
        return self.ctas + works - self.regular_works


@cute.jit
def make_rounds(works: cutlass.Int32, num_ctas: cutlass.Int32, is_read_bound: cutlass.Constexpr):
    """Choose the work items that have a CTA of their own: usually none.

    Some multiprocessors get a tenth more of DRAM's bandwidth than others. Where that adds up over
    many rounds, the hardware starts the last items where other CTAs end first. A CTA's start takes
    longer than a change of tiles, so few rounds do not gain by it.
    """
    regular_works = cutlass.Int32(works)
    if cutlass.const_expr(is_read_bound):  # noqa: SIM102 static, then dynamic
        if works >= MIN_ROUNDS * num_ctas:
            regular_works = works - works % num_ctas
    return Rounds(cutlass.min(works, num_ctas), regular_works)
