"""Scheduler warp of the Hopper kernels: the key spans of a CTA's work tiles, in shared memory.

It is a warp of its own, because the loads of lengths take their time behind the key tiles that the
load warp asks for.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import (
    BOTH_BRANCHES,
    HIT,
    MISS,
    KeySpan,
    SeqlenInfo,
    tiles_of_split,
)
from dsv4.kernels.attention.mask import clamp_length
from dsv4.kernels.attention.sm90.kv_source import SpeculativeTile, speculate_first_tile
from dsv4.kernels.kit import pdl


@cute.jit
def window_len_of(seqlens: SeqlenInfo, request: cutlass.Int32):
    """Given window length of a request, or 0 for that of a padding token."""
    window_len = cutlass.Int32(0)
    if request >= 0 and request < seqlens.batch:
        window_len = seqlens.swa_lens[request]
    return window_len


@cute.jit
def key_span(
    seqlens: SeqlenInfo,
    token: cutlass.Int32,
    split: cutlass.Int32,
    by_splits: cute.FastDivmodDivisorV2,
    speculative: SpeculativeTile,
    keys: cutlass.Constexpr,
    is_causal: cutlass.Constexpr,
    sliding_window: cutlass.Constexpr,
):
    """The keys of a split of a token; a padding token has none. The whole warp calls this."""
    # The window's length is loaded for the likely request, beside the request itself.
    likely_request = speculative.tile.request
    window_len = window_len_of(seqlens, likely_request)
    compressed_len = cutlass.Int32(seqlens.compressed_rows)
    if token < seqlens.compressed_lens.shape[0]:
        compressed_len = seqlens.compressed_lens[token]
    request = seqlens.request_ids[token]
    if request != likely_request:
        window_len = window_len_of(seqlens, request)
    compressed_len = clamp_length(compressed_len, seqlens.compressed_rows)
    window_end = clamp_length(window_len, seqlens.window_rows)
    window_begin = cutlass.Int32(0)
    if cutlass.const_expr(is_causal):
        # The token sits as far from the window's end as from its request's last token.
        window_end -= tokens_after(seqlens, token, request)
        window_end = cutlass.max(window_end, 0)
        window_begin = cutlass.max(window_end - sliding_window, 0)
    if request < 0 or request >= seqlens.batch:
        compressed_len = cutlass.Int32(0)
        window_begin = cutlass.Int32(0)
        window_end = cutlass.Int32(0)

    compressed_tiles = cute.ceil_div(compressed_len, keys)
    tiles = compressed_tiles + cute.ceil_div(window_end - window_begin, keys)
    first, count = tiles_of_split(tiles, split, by_splits)
    window = (window_begin, window_end, request)
    span = KeySpan(count, cutlass.Int32(0), first, compressed_len, compressed_tiles, *window)
    is_window, row, _ = span.tile(first, keys)
    flags = cutlass.Int32(0)
    if compressed_len > 0 and window_end > window_begin:
        flags |= BOTH_BRANCHES
    if speculative.exists():
        tile = speculative.tile
        is_same = count > 0 and is_window == tile.is_window and row == tile.row
        if is_same and not (is_window and request != tile.request):
            flags |= HIT
        else:
            flags |= MISS
    return span._replace(flags=flags)


@cute.jit
def tokens_after(seqlens: SeqlenInfo, token: cutlass.Int32, request: cutlass.Int32):
    """How many consecutive tokens of the same request follow; the whole warp searches."""
    lane = cute.arch.lane_idx()
    count = cutlass.Int32(0)
    searching = cutlass.Boolean(True)
    while searching:
        other = token + 1 + count + lane
        same = cutlass.Boolean(False)
        if other < seqlens.tokens:
            same = seqlens.request_ids[other] == request
        ballot = cute.arch.vote_ballot_sync(same)
        # The length of the ballot's run of trailing ones.
        run = cute.arch.popc(ballot & ~(ballot + 1))
        count += run
        searching = run == 32
    return count


@cute.jit
def schedule(
    words: cute.Tensor,
    pipeline,
    seqlens: SeqlenInfo,
    tiling,
    scheduler,
    keys: cutlass.Constexpr,
    is_causal: cutlass.Constexpr,
    sliding_window: cutlass.Constexpr,
    on_hit: cutlass.Constexpr,
):
    """Publish the key span of each of a CTA's work tiles.

    Args:
        words: a key span in shared memory, the buffer of `pipeline`.
        tiling, scheduler: which work tiles there are, and which of them this CTA has.
        keys: of a key tile.
        on_hit: called with a span whose first tile was loaded speculatively, before the span is
            published; or None.
    """
    lane = cute.arch.lane_idx()
    index, stop, step = scheduler.range_of(cute.arch.block_idx()[0])
    _, split, token = tiling.coordinates(index)
    speculative = speculate_first_tile(seqlens, token, split, tiling.by_splits, keys)
    phase = cutlass.Int32(1)
    pdl.wait_for_previous_launch()
    while index < stop:
        span = key_span(
            *(seqlens, token, split, tiling.by_splits, speculative),
            *(keys, is_causal, sliding_window),
        )
        pipeline.acquire(phase)
        phase ^= 1
        if lane == 0:
            span.store(words)
            if cutlass.const_expr(on_hit is not None):  # noqa: SIM102 static, then dynamic
                if span.has(HIT):
                    on_hit(span)
            cute.arch.mbarrier_arrive(pipeline.full)
        index += step
        _, split, token = tiling.coordinates(index)
        speculative = speculative.none()
