"""Fragments of the Hopper kernel: weights on their way to PV, accumulators, masked rows of V.

A thread holds the weights of 16 keys, as the accumulators of QK, at the very places where PV wants
them in registers as its A operand. So P is not rearranged on its way from one warpgroup to another:
it passes through shared memory as it is, between threads of the same number.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.device import by_row, frozen
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows


def score_fragments(kernel, smem):
    """Operands and state of a thread of the score warpgroup."""
    thread = cute.arch.thread_idx()[0] % 128
    lane = cute.arch.lane_idx()
    mma, register_mma = kernel.qk_mma(), kernel.qk_register_mma()
    mma_slice = mma.get_slice(0)
    q_shape = register_mma.partition_shape_A((kernel.heads, max(kernel.q_register_dim, 16)))
    s = mma.make_fragment_C(mma.partition_shape_C((kernel.heads, kernel.keys)))
    return frozen(
        thread=thread,
        lane=lane,
        row=thread // 32 * 16 + lane // 4,
        q=mma_slice.make_fragment_A(mma_slice.partition_A(smem.q)),
        q_registers=register_mma.make_fragment_A(q_shape),
        k=mma_slice.make_fragment_B(mma_slice.partition_B(smem.k)),
        s=s,
        p=cute.make_rmem_tensor_like(s, kernel.dtype),
        rows=Rows.make(),
    )


def weight_steps(p: cute.Tensor) -> cute.Tensor:
    """A fragment of weights as [8, K step]."""
    return cute.make_tensor(p.iterator, cute.make_layout((8, cute.size(p) // 8)))


@cute.jit
def zero_rows(vectors: cute.Tensor, begin, dtype: cutlass.Constexpr):
    """Clear the masked rows of a block, which is V next: P is 0 there, but 0 * NaN is NaN.

    Args:
        vectors: [8, rows * vectors per row, chunk] of the block.
        begin: first of the second mode for this thread, which goes on in steps of 128.
    """
    zero = cute.make_rmem_tensor(8, dtype)
    zero.fill(0.0)
    for i in cutlass.range(begin, cute.size(vectors, mode=[1]), 128, unroll=1):
        for chunk in cutlass.range_constexpr(cute.size(vectors, mode=[2])):
            cute.autovec_copy(zero, vectors[None, i, chunk])
    cute.arch.fence_view_async_shared()


@cute.jit
def scale_rows(acc: cute.Tensor, factors):
    """Multiply the two rows of an accumulator fragment."""
    rows = by_row(acc)
    for j in cutlass.range_constexpr(cute.size(rows, mode=[2])):
        for c in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                rows[r, c, j] *= factors[r]
