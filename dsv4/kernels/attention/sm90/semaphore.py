"""How the CTAs of a group meet that have left something for each other in the workspace.

Each arrives at the group's counter and waits for the others. Nobody has to: a CTA whose patience
ends leaves its share of what follows to the last one to arrive. So the kernel needs no CTA to run
beside another one, whatever else the GPU does.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.device import pointer_at, tree
from dsv4.kernels.attention.softmax import exp2

# Reads of the counter, 0.4 us each, before a CTA leaves its share to the last one.
PATIENCE = 256
ARRIVAL = 32  # first bit of the arrivals in a counter


class Meeting:
    """The counters [group][half], 64 bits each and 0 before the first launch, at the start of a
    workspace: warpgroups that have a half each meet each by itself."""

    @cute.jit
    def generation(self, workspace, member, half, thread):
        """What `arrive` compares with, read before it: thread 0's alone has a meaning."""
        before = cutlass.Int64(0)
        if thread == 0:
            counter = self._counter(workspace, member, half)
            before = cute.arch.load(counter, cutlass.Int64, sem="relaxed", scope="gpu")
        return before

    @cute.jit
    def arrive(self, workspace, tiling, member, half, thread):
        """Say that this CTA's half is there."""
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
        if thread == 0:
            counter = self._counter(workspace, member, half)
            first = cutlass.Int32(2**31 - 1) - (tiling.num_splits - 2)
            arrivals = cutlass.select_(member.split == 0, first, cutlass.Int32(1))
            arrival = cutlass.Int64(arrivals) << ARRIVAL
            cute.arch.red(counter, arrival, op="add", dtype="u64", sem="release", scope="gpu")

    @cute.jit
    def await_others(self, workspace, tiling, member, half, before, shares: cute.Tensor, thread):
        """Wait for the other splits, after `arrive`.

        Returns the shares of the half that the calling warpgroup must join, one bit each: usually
        its own alone. `shares` is the warpgroup's word in shared memory.

        The counter holds a generation (bit 63), arrivals (bits 32..62) and abandoned shares (bits
        0..31). The arrivals of a group add up to 2^31, which flips the generation and leaves 0 for
        the next launch, whatever its number of splits. A share abandoned before the flip is there
        for all who see the flip, and the last to arrive always does; who clears its bit joins it.

        Order: the barrier of `arrive` puts the stores of all threads before the atomic of one,
        whose release at GPU scope is cumulative. Read-modify-writes continue a release sequence, so
        an acquire that reads the flip synchronises with all arrivals; the barrier here extends that
        to the warpgroup. All accesses are of the generic proxy.
        """
        if thread == 0:
            counter = self._counter(workspace, member, half)
            # With work items left to start, some may be what the others wait for: go on at once.
            is_one_round = tiling.works <= cute.arch.grid_dim()[0]
            reads = cutlass.select_(is_one_round, cutlass.Int32(0), cutlass.Int32(PATIENCE))
            now = before
            while reads < PATIENCE and now ^ before >= 0:
                now = cute.arch.load(counter, cutlass.Int64, sem="acquire", scope="gpu")
                reads += 1
            taken = cutlass.Int32(1) << member.split
            if now ^ before >= 0:
                mine = cutlass.Int64(cutlass.Uint32(taken))
                now = mine | cute.arch.atomic_or(counter, mine, sem="acq_rel", scope="gpu")
                taken = cutlass.Int32(0)
            abandoned = cutlass.Int32(now)
            if now ^ before < 0 and abandoned != 0:
                rest = ~cutlass.Int64(cutlass.Uint32(abandoned))
                found = cute.arch.atomic_and(counter, rest, sem="relaxed", scope="gpu")
                taken |= cutlass.Int32(found) & abandoned
            shares[half] = taken
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
        return shares[half]

    def _counter(self, workspace, member, half) -> cute.Pointer:
        offset = cutlass.Int64(member.group * 4 + half * 2)
        return pointer_at(workspace.iterator, offset, cutlass.Int64, 8)


def weigh_splits(stats: cute.Tensor, top_of_lanes, sum_of_lanes, scales=None):
    """Weights of splits whose statistics several lanes hold, some each.

    Args:
        stats: [2, splits of this lane] references and sums; the references become weights.
        top_of_lanes, sum_of_lanes: reduce a value over these lanes.
        scales: [splits of this lane] of the stored values, a part of their weights.

    Returns:
        The reference that all weights are relative to, and the total of the weighted sums.
    """
    splits = range(cute.size(stats, mode=[1]))
    top = top_of_lanes(tree(cute.arch.fmax, [stats[0, i] for i in splits]))
    origin = cutlass.select_(top == -cutlass.Float32.inf, cutlass.Float32(0.0), top)
    total = cutlass.Float32(0.0)
    for i in splits:
        weight = exp2(stats[0, i] - origin)
        total += weight * stats[1, i]
        stats[0, i] = weight if scales is None else weight * scales[i]
    return top, sum_of_lanes(total)
