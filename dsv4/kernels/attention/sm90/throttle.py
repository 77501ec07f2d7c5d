"""How far the load warps of different multiprocessors may run apart."""

from enum import Enum, auto

import cutlass
from cutlass import cute

# Neighbours that read the same keys belong on the two multiprocessors that share a way to L2: what
# both want at the same time leaves L2 once, and 117 bytes per ns reach each of them instead of 65.
# Only a cluster puts them there.
CLUSTER = (2, 1, 1)


class Pace(Enum):
    """What a load warp waits for besides an empty stage."""

    FREE = auto()
    # The half before the last one. The longer the queues in front of DRAM, the less evenly they
    # serve the multiprocessors, and the last one ends the launch. Two halves keep DRAM busy.
    TWO_HALVES = auto()
    # The neighbour: over many tiles, those who read the same keys would drift apart.
    IN_STEP = auto()


@cute.jit
def even_grid(works: cutlass.Int32, num_ctas: cutlass.Int32):
    """CTAs for so many work items on so many multiprocessors, in pairs; one may have no work."""
    return cutlass.max(cutlass.min((works + 1) // 2, num_ctas // 2), 1) * 2


@cute.jit
def meet():
    """Wait for all threads of both neighbours that have not ended. At the start, no arrival may
    come to a barrier that is not there yet. At the end nothing depends on it as long as `keep_step`
    waits for every arrival of the neighbour: it keeps a CTA's memory until both are through."""
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def keep_step(barriers: cute.Pointer, stage: cutlass.Int32, phase, lane):
    """Wait until both neighbours are about to fill a stage of their rings.

    Args:
        barriers: of this CTA, one for each stage, with one arrival: the neighbour's.
        phase: parity of the stage's turn, as of the barrier that says that it is empty.
    """
    if lane == 0:
        neighbour = cute.arch.block_idx_in_cluster() ^ 1
        cute.arch.mbarrier_arrive(barriers + stage, neighbour)
    cute.arch.mbarrier_wait(barriers + stage, phase ^ 1)
