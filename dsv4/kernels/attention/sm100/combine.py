"""Combine kernel of split-KV: merges the partial rows of all splits, always in split order."""

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.sink_merge import output_scale, row_lse
from dsv4.kernels.attention.sm100.plan_combine import BATCH, THREADS, PlanCombine
from dsv4.kernels.attention.split_kv import STATS
from dsv4.kernels.attention.split_reduce import split_weights
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.pointers import row_pointer


class Combine:
    """Combine of splits: o = sum_s 2^(m_s - m) O_s / (sum_s 2^(m_s - m) l_s + sink).

    A few warps compute a row: every warp the weights of all splits, a lane each, every group of
    threads the sum of `BATCH` splits.
    """

    def __init__(self, head_dim: int, num_query_heads: int, sink_mode: str, o_dtype):
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads
        self.is_softmax_sink = sink_mode == "softmax"
        self.o_dtype = o_dtype
        self.plan = PlanCombine(head_dim)

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Combine what the splits of an attention with these arguments have left."""
        num_splits, outputs = arguments.num_splits, self._outputs(arguments)
        rows = outputs[-1].shape[0] * self.num_query_heads
        tensors = (arguments.workspace, arguments.sink_logits, outputs, arguments.lse)
        self.kernel(*tensors, num_splits).launch(
            grid=[cute.ceil_div(rows, self.plan.rows_per_block), 1, 1],
            block=[THREADS, cute.ceil_div(num_splits, BATCH), 1],
            stream=stream,
            # The number of threads is known at run time only: bound it for the compiler.
            max_number_threads=[THREADS, self.plan.groups, 1],
            use_pdl=True,
        )

    def _outputs(self, arguments: FmhaArguments) -> tuple[cute.Tensor, ...]:
        """What is written; the last one has a row for each token."""
        return (arguments.o,)

    @cute.kernel
    def kernel(
        self,
        workspace: cute.Tensor,  # [>= T * n_h * splits * (head_dim + STATS)] fp32
        sink_logits: cute.Tensor,  # [n_h] fp32
        outputs: tuple[cute.Tensor, ...],  # o [T, n_h, head_dim]
        lse: cute.Tensor,  # [T or 0, n_h] fp32
        num_splits: cutlass.Int32,
    ):
        thread, group, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        rows = outputs[-1].shape[0] * self.num_query_heads
        row = (
            cute.arch.block_idx()[0] * self.plan.rows_per_block
            + thread // self.plan.threads_per_row
        )
        column = thread % self.plan.threads_per_row * self.plan.vector
        sums = SmemAllocator().allocate_tensor(
            cutlass.Float32,
            cute.make_layout((self.plan.vector, THREADS, self.plan.groups)),
            byte_alignment=16,
        )
        acc = cute.make_rmem_tensor(self.plan.vector, cutlass.Float32)
        acc.fill(0.0)
        row_max, row_sum = cutlass.Float32(0.0), cutlass.Float32(0.0)
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        stats = partial_stats(workspace, rows, num_splits, self.head_dim)
        if row < rows:
            # ---- weights of the splits, one lane each
            first_partial = row * num_splits
            partial = first_partial + cutlass.min(lane, num_splits - 1)
            own = cute.make_rmem_tensor((2, 1), cutlass.Float32)
            own[0, 0], own[1, 0] = stats[0, partial], stats[1, partial]
            row_max, row_sum = split_weights(
                own,
                cute.arch.warp_reduction_max,
                cute.arch.warp_reduction_sum,
                is_split=lane < num_splits,
            )
            weight = own[0, 0]

            # ---- partial rows of this group of threads
            for i in cutlass.range_constexpr(BATCH):
                # Past the last split its weight is 0.
                split = group * BATCH + i
                factor = cute.arch.shuffle_sync(weight, split)
                index = first_partial + cutlass.min(split, num_splits - 1)
                source = partial_pointer(workspace, index, self.head_dim) + column
                values = cute.make_rmem_tensor(self.plan.vector, cutlass.Float32)
                cute.autovec_copy(
                    cute.make_tensor(source, cute.make_layout(self.plan.vector)), values
                )
                for c in cutlass.range_constexpr(self.plan.vector):
                    acc[c] += factor * values[c]

        # ---- sum of the groups, in split order
        cute.autovec_copy(acc, sums[None, thread, group])
        cute.arch.sync_threads()
        if group == 0 and row < rows:
            for other in cutlass.range(1, cute.ceil_div(num_splits, BATCH), unroll=1):
                for c in cutlass.range_constexpr(self.plan.vector):
                    acc[c] += sums[c, thread, other]
            token, head = row // self.num_query_heads, row % self.num_query_heads
            scale = output_scale(row_max, row_sum, sink_logits[head], self.is_softmax_sink)
            for c in cutlass.range_constexpr(self.plan.vector):
                acc[c] *= scale
            self._store(outputs, token, head, column, acc)
            if token < lse.shape[0] and column == 0:
                lse[token, head] = row_lse(row_max, row_sum, stats[2, row * num_splits])

    @cute.jit
    def _store(self, outputs: tuple, token, head, column, values: cute.Tensor):
        """Round and write a thread's columns of a row, from `column` on."""
        out = cute.make_rmem_tensor(self.plan.vector, self.o_dtype)
        for c in cutlass.range_constexpr(self.plan.vector):
            out[c] = values[c].to(self.o_dtype)
        target = row_pointer(outputs[0], token, head) + column
        cute.autovec_copy(out, cute.make_tensor(target, cute.make_layout(self.plan.vector)))


def partial_pointer(workspace: cute.Tensor, index, head_dim: int) -> cute.Pointer:
    """16-byte aligned address of partial row `index` = row * num_splits + split."""
    address = (workspace.iterator + cutlass.Int64(index) * head_dim).toint()
    return cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=16)


def partial_stats(workspace: cute.Tensor, rows, num_splits, head_dim: int) -> cute.Tensor:
    """Statistics [STATS, row * num_splits + split], behind the partial rows.

    Max, sum, gate offset of the lse, and a 0 that makes them one 16-byte store.
    """
    count = cutlass.Int64(rows) * num_splits
    pointer = partial_pointer(workspace, count, head_dim)
    return cute.make_tensor(pointer, cute.make_layout((STATS, count)))
