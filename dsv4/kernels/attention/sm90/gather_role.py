"""Base of the gather warps of both paged kernels: their place, the span of a work tile."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import FLAGS_WORD, INDEX_SHIFT, KeySpan
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.plan import KEYS
from dsv4.kernels.kit.tma import prefetch_descriptors


class EarlyKeys(NamedTuple):
    """Keys of a CTA's first work tile, found while the launch before may still run."""

    span: KeySpan
    word: cutlass.Int32  # of the thread's row of the first key tile, where a table names it
    is_known: cutlass.Boolean
    has_word: cutlass.Boolean

    def none(self):
        """For the work tiles after the first one."""
        return self._replace(is_known=cutlass.Boolean(False), has_word=cutlass.Boolean(False))


@cute.jit
def told_index(ctx, phase, index):
    """The work tile that warps which compute have next: `index`, or where tokens have pieces the
    one whose keys have been found, which they wait for here."""
    if cutlass.const_expr(ctx.tiling.has_pieces):
        ctx.pipes.span.wait(phase)
        word = ctx.smem.span[FLAGS_WORD] >> INDEX_SHIFT
        index = cute.arch.make_warp_uniform(word)
    return index


@cute.jit
def load_span(ctx, phase, lane) -> KeySpan:
    """The key span of the next work tile; its place is free then. Warps that compute call this."""
    if cutlass.const_expr(not ctx.tiling.has_pieces):
        ctx.pipes.span.wait(phase)
    span = KeySpan.load(ctx.smem.span)
    ctx.pipes.span.release(lane)
    return span


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
    def _find_early(self, ctx, keys: PagedKeys, token, split, warp, lane) -> EarlyKeys:
        """Keys of a work tile from lengths, positions and tables alone, which the launch before
        does not write; rows that a table names are asked for, to L2. What that launch still writes
        of them meets them there."""
        is_known = cutlass.Boolean(not self.is_gate)
        span = keys.span(token, split, ctx.tiling.by_splits, KEYS, False)
        row = warp * self.rows.warp_keys + lane % self.rows.warp_keys
        word = cutlass.Int32(-1)
        has_word = is_known & (span.count > 0) & keys.has_table(span, span.first)
        if has_word:
            word = keys.fetch(span, token, span.first, row, KEYS)
            address, scales = keys.addresses(span, span.first, row, word, KEYS, self.rows.entry)
            self.rows.prefetch(address, scales, lane)
        return EarlyKeys(span, word, is_known, has_word)

    @cute.jit
    def _find_pieces(self, ctx, keys: PagedKeys, lane):
        """A bit for each of a CTA's work tiles, 32 at most, whose token has so many pieces. Once:
        beside the gather of key tiles, registers are scarce."""
        first, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        own = first + lane * step
        is_piece = cutlass.Boolean(False)
        if own < stop:
            _, split, token = ctx.tiling.coordinates(own)
            is_piece = split < ctx.tiling.by_splits.number(keys.tiles(token, KEYS))
        return cutlass.Int32(cute.arch.vote_ballot_sync(is_piece))

    @cute.jit
    def _take_piece(self, ctx, pieces):
        """The work tile of a CTA's first piece, or the end behind its last one; and the others."""
        first, _, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        # 32 without a bit.
        place = cute.arch.popc(~pieces & (pieces - 1))
        return first + place * step, pieces & (pieces - 1)

    @cute.jit
    def _end(self, ctx, phase, stop, warp, lane):
        """Tell the warps that compute that no piece is left."""
        words = ctx.smem.span
        if cutlass.const_expr(ctx.tiling.has_pieces):  # noqa: SIM102 static, then dynamic
            if warp == 0:
                ctx.pipes.span.acquire(phase)
                if lane == 0:
                    words[FLAGS_WORD] = stop << INDEX_SHIFT
                    cute.arch.mbarrier_arrive(ctx.pipes.span.full)

    @cute.jit
    def _find_keys(
        self, ctx, keys: PagedKeys, index, phase, warp, lane, early: EarlyKeys | None = None
    ):
        """Span of a work tile's keys, which warp 0 tells the warps that compute, and the word of
        the first key tile's row that the thread has."""
        _, split, token = ctx.tiling.coordinates(index)
        row = warp * self.rows.warp_keys + lane % self.rows.warp_keys
        if cutlass.const_expr(early is None):
            span = keys.span(token, split, ctx.tiling.by_splits, KEYS, self.is_gate)
            word = keys.fetch(span, token, span.first, row, KEYS)
        else:
            span, word = early.span, early.word
            if not early.is_known:
                span = keys.span(token, split, ctx.tiling.by_splits, KEYS, self.is_gate)
            if not early.has_word:
                word = keys.fetch(span, token, span.first, row, KEYS)
        if warp == 0:
            ctx.pipes.span.acquire(phase)
            if lane == 0:
                told = span
                if cutlass.const_expr(ctx.tiling.has_pieces):
                    told = span._replace(flags=span.flags | index << INDEX_SHIFT)
                told.store(ctx.smem.span)
                cute.arch.mbarrier_arrive(ctx.pipes.span.full)
        return span, word
