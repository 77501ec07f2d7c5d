"""Split-KV combine of the swap-AB kernel in a cluster: the CTAs that hold the splits of a head tile
read each other's partial rows from shared memory.

Behind its last product a CTA leaves its accumulators and statistics where its key tiles were:

    accumulators  [8 heads][16 columns][lane][4] fp32, as their threads hold them
    statistics    [head][row max, row sum] fp32

The cluster's barrier then does what workspace, fence, counter and polls do between CTAs that may
not run side by side (`swap_ab_combine`), whose slices, order of splits and arithmetic these are:
the bits are the same. A CTA has one work tile: no key tile follows into the place.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm90.plan import SwapAbPlan
from dsv4.kernels.attention.sm90.swap_ab_combine import MathWarp, SwapAbCombine
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext
from dsv4.kernels.attention.sm90.swap_ab_softmax import Heads
from dsv4.kernels.attention.split_kv import (
    LANE_WORDS,
    MOST_CLUSTER_SPLITS,
    SPLIT_STATS,
    SplitKv,
)
from dsv4.kernels.kit.remote import load_remote

WORD_BYTES = 4


class SwapAbCluster(SwapAbCombine):
    """Partial rows of one kernel configuration in the shared memory of a cluster."""

    def __init__(self, config: FmhaConfig, plan: SwapAbPlan):
        super().__init__(config, plan)
        fewer = [1, *(splits for _, splits in self.batches)]
        self.batches = [
            (together, min(splits, MOST_CLUSTER_SPLITS))
            for (together, splits), least in zip(self.batches, fewer)
            if least < MOST_CLUSTER_SPLITS
        ]
        self.own = SplitKv(1, self.tile_heads, self.head_dim)
        size = self.own.split_words() * WORD_BYTES
        room = plan.slots * plan.slot_bytes
        assert size <= room, f"SMEM: partial rows take {size} of {room} bytes of key tiles"

    @cute.jit
    def meet(
        self, ctx: SwapAbContext, coord, acc: cute.Tensor, heads: Heads, w: MathWarp, has_both
    ):
        """Store the partial rows of a split, and combine a slice of those of all splits.

        The math warpgroup calls this, behind a barrier of its own: all of its warps have seen their
        last products end, which read the key tiles that were here. The other warps arrive at the
        cluster's barrier by ending: behind the last key tile there is nothing left for them.
        """
        self.store_accumulators(ctx, coord, acc, w)
        self.store_statistics(ctx, coord, heads, w)
        self._wait_for_splits()
        self._combine_slice(ctx, coord, coord.split, w, has_both)
        # No CTA ends while another one reads what it left.
        cute.arch.cluster_wait()

    def _wait_for_splits(self) -> None:
        """Wait until all splits have stored their partial rows."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _leave(self, is_through):
        # Ahead of the output's rows, which the release would wait for.
        if is_through:
            cute.arch.cluster_arrive()

    # ---- shared memory ----

    def _sink(self, ctx: SwapAbContext, head) -> cutlass.Float32:
        return ctx.smem.sinks[head]

    def _own_accumulators(self, ctx: SwapAbContext, coord, fragment) -> cute.Tensor:
        place = self._start(ctx) + self.own.fragment(fragment)
        return cute.make_tensor(place, cute.make_layout((LANE_WORDS, 32)))

    def _own_statistics(self, ctx: SwapAbContext, coord, head) -> cute.Tensor:
        place = self._start(ctx) + self.own.statistics_by_row(head)
        return cute.make_tensor(place, cute.make_layout(SPLIT_STATS))

    def _load_accumulators(self, ctx, coord, place: tuple, values: cute.Tensor) -> None:
        fragment, lane, split = place
        self._load(ctx, split, self.own.fragment(fragment) + lane * LANE_WORDS, values)

    def _load_statistics(self, ctx, coord, head, split, stats: cute.Tensor) -> None:
        self._load(ctx, split, self.own.statistics_by_row(head), stats)

    def _load(self, ctx: SwapAbContext, split, word, values: cute.Tensor) -> None:
        """Load words of what a split has left."""
        count = cute.size(values)
        place = (cutlass.Int32(split), word * WORD_BYTES, count, cutlass.Float32)
        for i, value in enumerate(load_remote(self._start(ctx), *place)):
            values[i] = value

    def _start(self, ctx: SwapAbContext) -> cute.Pointer:
        """Where key tiles were."""
        return cute.recast_ptr(ctx.smem.kv_start, dtype=cutlass.Float32)
