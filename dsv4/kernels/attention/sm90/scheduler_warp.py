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
    KeyRules,
    KeySpan,
    SeqlenInfo,
    key_span,
)
from dsv4.kernels.attention.sm90.kv_source import SpeculativeTile, speculate_first_tile
from dsv4.kernels.kit import pdl


@cute.jit
def with_flags(span: KeySpan, speculative: SpeculativeTile, keys: cutlass.Constexpr):
    """The span with its flags: both branches; hit or miss of its speculative tile, if there is
    one."""
    is_window, row, _ = span.tile(span.first, keys)
    flags, tile = cutlass.Int32(0), speculative.tile
    if span.compressed_len > 0 and span.window_end > span.window_begin:
        flags |= BOTH_BRANCHES
    if speculative.exists():
        is_same = span.count > 0 and is_window == tile.is_window and row == tile.row
        if is_same and not (is_window and span.request != tile.request):
            flags |= HIT
        else:
            flags |= MISS
    return span._replace(flags=flags)


@cute.jit
def schedule(
    words: cute.Tensor,
    pipeline,
    seqlens: SeqlenInfo,
    tiling,
    scheduler,
    rules: cutlass.Constexpr[KeyRules],
    on_hit: cutlass.Constexpr,
):
    """Publish the key span of each of a CTA's work tiles.

    Args:
        words: a key span in shared memory, the buffer of `pipeline`.
        tiling, scheduler: which work tiles there are, and which of them this CTA has.
        on_hit: called with a span whose first tile was loaded speculatively, before the span is
            published; or None.
    """
    lane = cute.arch.lane_idx()
    index, stop, step = scheduler.range_of(cute.arch.block_idx()[0])
    _, split, token = tiling.coordinates(index)
    speculative = speculate_first_tile(seqlens, token, split, tiling.by_splits, rules.tile_rows)
    phase = cutlass.Int32(1)
    pdl.wait_for_previous_launch()
    while index < stop:
        span = key_span(
            *(seqlens, token, split, tiling.by_splits, speculative.tile.request, rules),
        )
        span = with_flags(span, speculative, rules.tile_rows)
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
