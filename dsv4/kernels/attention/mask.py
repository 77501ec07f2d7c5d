"""Masks of attention: which tokens are padding, how many of a request follow, and the mask of the
one key tile of a span that is not full.

Every branch of the attention contract is one contiguous span of rows (`key_span`). Tiles start at
the first row of the span, wherever that is, so that a tile is either full or a prefix: there is no
mask at its head, and tiles past the span are never loaded. Nothing here depends on the
architecture.

Per-thread scores come as the accumulator fragment that wgmma and the 16x256b TMEM load share: two
rows, 8 apart, and of every 8 columns the pair that starts at `2 * (lane % 4)`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32


@cute.jit
def clamp_length(length: Int32, capacity: Int32) -> Int32:
    """A length outside 0..capacity is taken to the nearer end of the range."""
    return cutlass.max(cutlass.min(length, capacity), 0)


@cute.jit
def is_padding(request: Int32, batch: Int32) -> Boolean:
    """Whether a request id names none of the `batch` requests: its token is a padding token."""
    # One unsigned comparison would do, but the compiler makes it a signed one.
    return (request < 0) | (request >= batch)


@cute.jit
def tokens_after(request_ids: cute.Tensor, token: Int32, request: Int32) -> Int32:
    """How many tokens of `request` follow `token`; the tokens of a request are consecutive.

    A search with 32 probes a step: a scan would cost a long prefill more than the attention itself.
    The first step probes the next 32 tokens, which is all where requests are short, as in decode.
    All lanes of the warp must call it.

    Args:
        request_ids: [T] int32.
        token: index of a token of `request`.
    """
    lane = cute.arch.lane_idx()
    low = Int32(0)
    high = request_ids.shape[0] - Int32(1) - token
    step = Int32(1)
    while low < high:
        probe = cutlass.min(low + (lane + 1) * step, high)
        ballot = cute.arch.vote_ballot_sync(request_ids[token + probe] == request)
        # The run of ones from bit 0 on: a request that comes again later does not count.
        hits = cute.arch.popc(ballot & ~(ballot + 1))
        last_hit = cutlass.min(low + hits * step, high)
        if hits < 32:
            high = cutlass.min(low + (hits + 1) * step - 1, high)
        low = last_hit
        step = (high - low + 31) // 32
    return low


@cute.jit
def mask_tail(scores: cute.Tensor, valid: Int32, lane: Int32) -> None:
    """Set the scores of columns at and past `valid` to -inf.

    A select, not an addition: the masked rows of a tile may hold NaN.

    Args:
        scores: (2, columns / 4) fragment of one thread.
        valid: columns of the tile that are keys of the span.
        lane: of the thread in its warp.
    """
    column = lane % 4 * 2
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            is_key = column + i // 2 * 8 + i % 2 < valid
            scores[row, i] = cutlass.select_(is_key, scores[row, i], -Float32.inf)


@cute.jit
def mask_words(scores: cute.Tensor, words: tuple[Int32, Int32], lane: Int32) -> None:
    """`mask_tail` by a bit for each of 64 columns."""
    bits = [word >> lane % 4 * 2 for word in words]
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        column = i // 2 * 8 + i % 2
        is_key = bits[column // 32] & 1 << column % 32 != 0
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            scores[row, i] = cutlass.select_(is_key, scores[row, i], -Float32.inf)


@cute.jit
def mask_bits(scores: cute.Tensor, word: Int32) -> None:
    """The same for a thread that holds the 32 columns of one row that `word` has a bit of each."""
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        scores[0, i] = cutlass.select_(word & 1 << i != 0, scores[0, i], -Float32.inf)


@cute.jit
def mask_from(scores: cute.Tensor, first: Int32, valid: Int32) -> None:
    """`mask_tail` for a thread that holds consecutive columns of one row, from `first` on."""
    for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
        scores[0, i] = scores[0, i] if first + i < valid else -Float32.inf
