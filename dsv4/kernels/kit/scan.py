"""Prefix sums over the threads of a CTA."""

import cutlass
from cutlass import Int32, cute


@cute.jit
def sums_before(value: Int32, board: cute.Tensor) -> tuple[Int32, Int32]:
    """Sum of a value over the threads before this one, and over all of the CTA.

    All threads call this; before `board` is used again they meet.

    Args:
        board: a word for each warp, in shared memory.
    """
    thread = cute.arch.thread_idx()[0]
    lane, warp = thread % 32, thread // 32
    inclusive = value
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            inclusive += below
    if lane == 31:
        board[warp] = inclusive
    cute.arch.sync_threads()
    before, total = inclusive - value, Int32(0)
    for other in cutlass.range_constexpr(cute.size(board)):
        part = board[other]
        before += cutlass.select_(other < warp, part, Int32(0))
        total += part
    return before, total
