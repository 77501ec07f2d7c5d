"""Tile schedulers of persistent kernels: which work tiles a CTA computes, and how far the load
warps of different CTAs may run apart.
"""

from enum import Enum, auto
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.kit.mbarrier import Cursor

# Whole grids of work tiles after which SMs are so uneven that the tail is better dynamic.
MIN_GRIDS = 6
# CTAs that read the same rows belong on the two SMs of a TPC: what both want at the same time
# leaves L2 once, and 117 bytes per ns reach each of them instead of 65. Only a cluster puts them
# there.
CLUSTER_SHAPE = (2, 1, 1)


class StaticTileScheduler(NamedTuple):
    """Static persistent scheduler: a CTA computes every work tile that is a whole number of grids
    after its first one."""

    work_tiles: cutlass.Int32

    def range_of(self, cta):
        """First work tile of a CTA, end of the work tiles, and their distance."""
        return cta, self.work_tiles, cute.arch.grid_dim()[0]

    def next(self, index):
        """The CTA's work tile after `index`; where registers are scarce, instead of the distance
        that `range_of` keeps."""
        return index + cute.arch.grid_dim()[0]


class DynamicTailScheduler(NamedTuple):
    """Static persistent scheduler with a dynamic tail: whole grids as in `StaticTileScheduler`;
    each work tile beyond them may have a CTA of its own, which starts where another one ends."""

    ctas: cutlass.Int32  # persistent ones
    static_tiles: cutlass.Int32  # work tiles of all whole grids

    def range_of(self, cta):
        """First work tile of a CTA, end of the work tiles, and their distance."""
        is_tail = cta >= self.ctas
        tail = self.static_tiles + cta - self.ctas
        first = cutlass.select_(is_tail, cutlass.Int32(tail), cutlass.Int32(cta))
        stop = cutlass.select_(is_tail, cutlass.Int32(tail + 1), self.static_tiles)
        return first, stop, self.ctas

    def grid(self, work_tiles: cutlass.Int32):
        """CTAs of the launch."""
        return self.ctas + work_tiles - self.static_tiles


@cute.jit
def make_tail_scheduler(
    work_tiles: cutlass.Int32, num_sms: cutlass.Int32, is_read_bound: cutlass.Constexpr
):
    """Choose the work tiles of the dynamic tail: usually none.

    Some SMs get a tenth more of DRAM's bandwidth than others. Where that adds up over many grids,
    the hardware starts the last work tiles where other CTAs end first. A CTA's start takes longer
    than a change of work tiles, so few grids do not gain by it.
    """
    static_tiles = cutlass.Int32(work_tiles)
    if cutlass.const_expr(is_read_bound):  # noqa: SIM102 static, then dynamic
        if work_tiles >= MIN_GRIDS * num_sms:
            static_tiles = work_tiles - work_tiles % num_sms
    return DynamicTailScheduler(cutlass.min(work_tiles, num_sms), static_tiles)


class Throttle(Enum):
    """Condition that a load warp waits for besides an empty stage."""

    NONE = auto()
    # The half tile before the last one. The longer the queues in front of DRAM, the less evenly
    # they serve the SMs, and the last one ends the launch. Two half tiles keep DRAM busy.
    TWO_HALF_TILES = auto()
    # The other CTA of the cluster: over many tiles, CTAs that read the same rows would drift apart.
    CLUSTER_LOCKSTEP = auto()


@cute.jit
def cluster_grid(work_tiles: cutlass.Int32, num_sms: cutlass.Int32):
    """CTAs for so many work tiles on so many SMs, in clusters of two; one may have no work."""
    return cutlass.max(cutlass.min((work_tiles + 1) // 2, num_sms // 2), 1) * 2


@cute.jit
def cluster_sync():
    """Wait for all threads of the cluster that have not ended.

    At the start no arrival may come to an mbarrier that is not initialised. At the end nothing
    depends on it as long as `lockstep` waits for every arrival of the other CTA: it keeps a CTA's
    shared memory until both are through.
    """
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def lockstep(barriers: cute.Pointer, cursor: Cursor, lane):
    """Wait until both CTAs of a cluster are about to fill a stage of their rings.

    Args:
        barriers: of this CTA, one for each stage, with one arrival: the other CTA's.
        cursor: of the producer; the parity is that of the wait for an empty stage.
    """
    if lane == 0:
        other = cute.arch.block_idx_in_cluster() ^ 1
        cute.arch.mbarrier_arrive(barriers + cursor.stage, other)
    cute.arch.mbarrier_wait(barriers + cursor.stage, cursor.phase ^ 1)
