"""Sum of a token's rows over its experts, in the order of their ids, then the shared one; any
architecture."""

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.pointers import pointer_at

VECTOR = 8  # channels of a thread
PAIRS = VECTOR // 2


class Combine:
    """Kernel: y [T, D] = rows [T, k + 1, D] added in fp32, those without an expert left out.

    Args:
        hidden: D, a multiple of 8.
        top_k: k.
    """

    threads = 128

    def __init__(self, hidden: int, top_k: int):
        self.hidden = hidden
        self.top_k = top_k

    @cute.jit
    def launch(self, rows: cute.Tensor, ids: cute.Tensor, counts: cute.Tensor, y, stream):
        vectors = self.hidden // VECTOR
        self.kernel(rows, ids, counts, y).launch(
            grid=[cute.ceil_div(vectors, self.threads), y.shape[0], 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, ids: cute.Tensor, counts: cute.Tensor, y: cute.Tensor):
        block, token, _ = cute.arch.block_idx()
        channel = (block * self.threads + cute.arch.thread_idx()[0]) * VECTOR
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        if channel < self.hidden:
            # All rows are asked for before it is known which ones there are.
            words = cute.make_rmem_tensor((PAIRS, self.top_k + 1), Uint32)
            for place in cutlass.range_constexpr(self.top_k + 1):
                offset = (Int64(token) * (self.top_k + 1) + place) * self.hidden + channel
                source = pointer_at(rows.iterator, offset, Uint32)
                vector = cute.make_tensor(source, cute.make_layout(PAIRS))
                cute.autovec_copy(vector, words[None, place])
            experts = [ids[token, place] for place in range(self.top_k)]
            live = counts[1]
            sums = cute.make_rmem_tensor(VECTOR, Float32)
            sums.fill(0.0)
            is_live = token < live
            for place in cutlass.range_constexpr(self.top_k + 1):
                is_used = is_live
                if cutlass.const_expr(place < self.top_k):
                    is_used = is_live & (experts[place] >= 0)
                for i in cutlass.range_constexpr(PAIRS):
                    for c, value in enumerate(quant.unpack_bf16(words[i, place])):
                        total = sums[2 * i + c]
                        sums[2 * i + c] = cutlass.select_(is_used, total + value, total)
            values = cute.make_rmem_tensor(VECTOR, y.element_type)
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = sums[i].to(y.element_type)
            target = pointer_at(y.iterator, Int64(token) * y.stride[0] + channel, y.element_type)
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(VECTOR)))
