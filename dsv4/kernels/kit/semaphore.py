"""Global-memory semaphore for split-KV and split-K: a CTA waits until every split of its output
tile has published its partials, but not without bound.

A CTA that has polled `MAX_POLLS` times abandons its slice of what follows to the last CTA to
arrive. So no CTA depends on another one running beside it, whatever else the GPU does.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsv4.kernels.kit.pointers import pointer_at

# Reads of the counter, 0.4 us each, before a CTA abandons its slice.
MAX_POLLS = 256
ARRIVALS_BIT = 32  # first bit of the arrivals in a counter
COUNTER_WORDS = 2  # of 32 bits


@dataclass(frozen=True)
class Semaphore:
    """A counter of 64 bits, 0 before the first launch, on which the warpgroups of all splits of an
    output tile arrive, and wait for each other.

    The counter holds the epoch (bit 63), arrivals (bits 32..62) and abandoned slices (bits 0..31).
    The arrivals of all splits add up to 2^31, which flips the epoch and leaves 0 for the next
    launch, whatever its number of splits. A slice abandoned before the flip is visible to all that
    read the flip, and the last to arrive always does; the one that clears its bit combines it.

    Memory order: the named barrier of `arrive` puts the stores of all threads before the atomic of
    one, whose release at GPU scope is cumulative. Read-modify-writes continue a release sequence,
    so an acquire that reads the flip synchronises with all arrivals; the named barrier of `wait`
    extends that to the warpgroup. All accesses are of the generic proxy.
    """

    workspace: cute.Pointer  # words of 32 bits
    offset: cutlass.Int32  # of the counter, in words
    split: cutlass.Int32  # of this CTA
    num_splits: cutlass.Int32
    barrier: cutlass.Int32  # named barrier of the warpgroup
    thread: cutlass.Int32  # of the warpgroup

    @cute.jit
    def epoch(self):
        """The counter before `arrive`, which `wait` compares with: thread 0's alone has a
        meaning."""
        before = cutlass.Int64(0)
        if self.thread == 0:
            before = cute.arch.load(self._counter(), cutlass.Int64, sem="relaxed", scope="gpu")
        return before

    @cute.jit
    def arrive(self):
        """Publish the partials of this split: those of all threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=128)
        if self.thread == 0:
            counter = self._counter()
            first = cutlass.Int32(2**31 - 1) - (self.num_splits - 2)
            arrivals = cutlass.select_(self.split == 0, first, cutlass.Int32(1))
            arrival = cutlass.Int64(arrivals) << ARRIVALS_BIT
            cute.arch.red(counter, arrival, op="add", dtype="u64", sem="release", scope="gpu")

    @cute.jit
    def wait(self, before, may_poll, result: cute.Tensor):
        """Wait for the other splits, after `arrive`.

        Args:
            before: the epoch.
            may_poll: whether the others run, or have run: with work tiles left to start, some may
                be what this CTA would wait for in vain.
            result: [1] int32 in shared memory, of the warpgroup.

        Returns:
            The slices that the calling warpgroup combines, one bit each: usually its own alone.
        """
        if self.thread == 0:
            counter = self._counter()
            polls = cutlass.select_(may_poll, cutlass.Int32(0), cutlass.Int32(MAX_POLLS))
            now = before
            while polls < MAX_POLLS and now ^ before >= 0:
                now = cute.arch.load(counter, cutlass.Int64, sem="acquire", scope="gpu")
                polls += 1
            taken = cutlass.Int32(1) << self.split
            if now ^ before >= 0:
                mine = cutlass.Int64(cutlass.Uint32(taken))
                now = mine | cute.arch.atomic_or(counter, mine, sem="acq_rel", scope="gpu")
                taken = cutlass.Int32(0)
            abandoned = cutlass.Int32(now)
            if now ^ before < 0 and abandoned != 0:
                rest = ~cutlass.Int64(cutlass.Uint32(abandoned))
                found = cute.arch.atomic_and(counter, rest, sem="relaxed", scope="gpu")
                taken |= cutlass.Int32(found) & abandoned
            result[0] = taken
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=128)
        return result[0]

    def _counter(self) -> cute.Pointer:
        return pointer_at(self.workspace, cutlass.Int64(self.offset), cutlass.Int64, 8)
