"""CTAs that hand a token round the grid through global memory, the last one first."""

import cutlass
from cutlass import cute


@cute.kernel
def pass_token(token: cute.Tensor, order: cute.Tensor, total: cute.Tensor):
    """The CTA whose turn it is writes its index to `order[turn]`, adds it to `total` and lets the
    next one go."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    if thread == 0:
        turn = blocks - 1 - block
        seen = cute.arch.atomic_add(token.iterator, cutlass.Int32(0), sem="acquire", scope="gpu")
        while seen != turn:
            seen = cute.arch.atomic_add(
                token.iterator, cutlass.Int32(0), sem="acquire", scope="gpu"
            )
        order[turn] = block
        total[0] = total[0] + block
        cute.arch.atomic_add(token.iterator, cutlass.Int32(1), sem="release", scope="gpu")


@cute.jit
def launch_token(token: cute.Tensor, order: cute.Tensor, total: cute.Tensor, stream):
    """One CTA per element of `order`."""
    grid = (cute.size(order), 1, 1)
    pass_token(token, order, total).launch(grid=grid, block=(32, 1, 1), stream=stream)
