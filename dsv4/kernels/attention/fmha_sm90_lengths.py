"""Which keys a token sees: the lengths of its branches, clamped, as the load warp finds them."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsv4.kernels.attention.mask import clamp_length


class Lengths(NamedTuple):
    """Everything that says how many keys there are."""

    tokens: cutlass.Int32
    compressed_rows: cutlass.Int32
    batch: cutlass.Int32
    window_rows: cutlass.Int32
    swa_lens: cute.Tensor  # [batch] int32
    request_ids: cute.Tensor  # [T] int32
    compressed_lens: cute.Tensor  # [T] int32, or [0]: every row counts


class KeyRange(NamedTuple):
    """The keys that a token sees."""

    compressed_len: cutlass.Int32
    window_begin: cutlass.Int32
    window_end: cutlass.Int32  # exclusive


@cute.jit
def request_of(lengths: Lengths, token: cutlass.Int32):
    """Request and given compressed length of a token: the loads that depend on no other."""
    compressed_len = cutlass.Int32(lengths.compressed_rows)
    if token < lengths.compressed_lens.shape[0]:
        compressed_len = lengths.compressed_lens[token]
    return lengths.request_ids[token], compressed_len


@cute.jit
def window_of(lengths: Lengths, request: cutlass.Int32):
    """Given window length of a request, or 0 for that of a padding token."""
    window_len = cutlass.Int32(0)
    if request >= 0 and request < lengths.batch:
        window_len = lengths.swa_lens[request]
    return window_len


@cute.jit
def key_range(
    lengths: Lengths,
    token: cutlass.Int32,
    request: cutlass.Int32,
    compressed_len: cutlass.Int32,
    window_len: cutlass.Int32,
    is_causal: cutlass.Constexpr,
    sliding_window: cutlass.Constexpr,
):
    """The keys of a token; a padding token has none.

    The lengths are as given; the whole warp calls this.
    """
    is_real = request >= 0 and request < lengths.batch
    compressed_len = clamp_length(compressed_len, lengths.compressed_rows)
    window_end = clamp_length(window_len, lengths.window_rows)
    window_begin = cutlass.Int32(0)
    if cutlass.const_expr(is_causal):
        # The token sits as far from the window's end as from its request's last token.
        window_end -= tokens_after(lengths, token, request)
        window_end = cutlass.max(window_end, 0)
        window_begin = cutlass.max(window_end - sliding_window, 0)
    nothing = cutlass.Int32(0)
    return KeyRange(
        cutlass.select_(is_real, compressed_len, nothing),
        cutlass.select_(is_real, window_begin, nothing),
        cutlass.select_(is_real, window_end, nothing),
    )


@cute.jit
def likely_first_block(
    lengths: Lengths,
    split: cutlass.Int32,
    num_splits: cutlass.Int32,
    keys: cutlass.Constexpr,
):
    """First block of a split if all lengths are full, which they mostly are; -1 for a block of the
    window, whose request is not known without a load."""
    blocks = cute.ceil_div(lengths.compressed_rows, keys)
    blocks += cute.ceil_div(lengths.window_rows, keys)
    block = blocks * split // num_splits
    is_compressed = block * keys < lengths.compressed_rows
    return cutlass.select_(is_compressed, block, cutlass.Int32(-1))


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
