"""Base of the gather warps of both paged kernels: their place, the span of a work tile."""

from cutlass import cute

from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.plan import KEYS
from dsv4.kernels.kit.tma import prefetch_descriptors


class GatherRole:
    """Base of both kernels' gather warps, which have `plan`, `rows` and `is_gate`."""

    @cute.jit
    def _begin(self, q_map):
        """The warp's number among those that gather, and its lane."""
        lane = cute.arch.lane_idx()
        first = self.plan.warps["gather"].first
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx() - first)
        if warp == 0:
            prefetch_descriptors((q_map,))
        return warp, lane

    @cute.jit
    def _find_keys(self, ctx, keys: PagedKeys, token, split, phase, warp, lane):
        """Span of a work tile's keys, which warp 0 tells the warps that compute, and the word of
        the first key tile's row that the thread has."""
        span = keys.span(token, split, ctx.tiling.by_splits, KEYS, self.is_gate)
        row = warp * self.rows.warp_keys + lane % self.rows.warp_keys
        word = keys.fetch(span, token, span.first, row, KEYS)
        if warp == 0:
            ctx.pipes.span.acquire(phase)
            if lane == 0:
                span.store(ctx.smem.span)
                cute.arch.mbarrier_arrive(ctx.pipes.span.full)
        return span, word
