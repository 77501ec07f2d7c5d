"""Named barriers of the Hopper kernels; 0 is that of the whole CTA."""

from enum import IntEnum


class HeadsMBarrier(IntEnum):
    """Barriers of the heads-in-M kernel."""

    COMBINE = 1  # of the first output warpgroup; that of the second is the next one
    COMBINE_SECOND = 2
    QUERIES = 3  # of the score warpgroup, around its codes of queries


class SwapAbBarrier(IntEnum):
    """Barriers of the swap-AB kernel."""

    COMBINE = 1  # of the math warpgroup, around the semaphore
    MATH = 3  # of the math warpgroup, around its reductions
