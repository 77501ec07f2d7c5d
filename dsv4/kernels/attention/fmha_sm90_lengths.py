"""Which keys a token sees: the lengths of its branches, clamped, as the load warp finds them."""

from typing import NamedTuple

import cutlass
from cutlass import cute


class Lengths(NamedTuple):
    """Everything that says how many keys there are."""

    tokens: cutlass.Int32
    compressed_rows: cutlass.Int32
    batch: cutlass.Int32
    window_rows: cutlass.Int32
    swa_lens: cute.Tensor  # [batch] int32
    request_ids: cute.Tensor  # [T] int32
    compressed_lens: cute.Tensor  # [T] int32, or [0]: every row counts


@cute.jit
def key_range(
    lengths: Lengths,
    token: cutlass.Int32,
    is_causal: cutlass.Constexpr,
    sliding_window: cutlass.Constexpr,
):
    """Compressed keys, window rows [begin, end) and request of a token; a padding token has none.

    The whole warp calls this.
    """
    # Both loads are under way before either is used.
    request = lengths.request_ids[token]
    compressed_len = cutlass.Int32(lengths.compressed_rows)
    if token < lengths.compressed_lens.shape[0]:
        compressed_len = lengths.compressed_lens[token]
    is_real = request >= 0 and request < lengths.batch
    compressed_len = cutlass.max(cutlass.min(compressed_len, lengths.compressed_rows), 0)
    window_end = cutlass.Int32(0)
    if is_real:
        window_end = lengths.swa_lens[request]
    window_end = cutlass.max(cutlass.min(window_end, lengths.window_rows), 0)
    window_begin = cutlass.Int32(0)
    if cutlass.const_expr(is_causal):
        # The token sits as far from the window's end as from its request's last token.
        window_end -= tokens_after(lengths, token, request)
        window_end = cutlass.max(window_end, 0)
        window_begin = cutlass.max(window_end - sliding_window, 0)
    nothing = cutlass.Int32(0)
    return (
        cutlass.select_(is_real, compressed_len, nothing),
        cutlass.select_(is_real, window_begin, nothing),
        cutlass.select_(is_real, window_end, nothing),
        request,
    )


@cute.jit
def tokens_after(lengths: Lengths, token: cutlass.Int32, request: cutlass.Int32):
    """How many consecutive tokens of the same request follow; the whole warp searches."""
    lane = cute.arch.lane_idx()
    count = cutlass.Int32(0)
    searching = cutlass.Boolean(True)
    while searching:
        other = token + 1 + count + lane
        same = cutlass.Boolean(False)
        if other < lengths.tokens:
            same = lengths.request_ids[other] == request
        ballot = cute.arch.vote_ballot_sync(same)
        # The length of the ballot's run of trailing ones.
        run = cute.arch.popc(ballot & ~(ballot + 1))
        count += run
        searching = run == 32
    return count
