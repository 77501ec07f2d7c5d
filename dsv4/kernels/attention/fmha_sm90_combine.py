"""Joins the split-KV partials of the Hopper attention kernel, always in split order."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.fmha_sm90_device import LN_2, LOG2_E, exp2

THREADS = 128
VECTOR = 4
# Partials carry [max, sum, gate offset of the lse, 0] per row: one 16-byte store.
STATS = 4


class CombineSm90:
    """o = sum_s 2^(m_s - m) O_s / (sum_s 2^(m_s - m) l_s + sink), one thread per four columns of a row."""

    def __init__(self, head_dim: int, num_query_heads: int, sink_mode: str, o_dtype):
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads
        self.is_softmax_sink = sink_mode == "softmax"
        self.o_dtype = o_dtype
        self.threads_per_row = head_dim // VECTOR
        self.rows_per_block = THREADS // self.threads_per_row
        assert self.rows_per_block * self.threads_per_row == THREADS

    @cute.jit
    def __call__(
        self,
        workspace: cute.Tensor,  # [>= T * n_h * splits * (head_dim + STATS)] fp32
        sink_logits: cute.Tensor,  # [n_h] fp32
        o: cute.Tensor,  # [T, n_h, head_dim]
        lse: cute.Tensor,  # [T or 0, n_h] fp32
        num_splits: cutlass.Int32,
        stream,
    ):
        rows = o.shape[0] * self.num_query_heads
        self.kernel(workspace, sink_logits, o, lse, num_splits).launch(
            grid=[cute.ceil_div(rows, self.rows_per_block), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        workspace: cute.Tensor,
        sink_logits: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        num_splits: cutlass.Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * self.rows_per_block + thread // self.threads_per_row
        column = thread % self.threads_per_row * VECTOR
        rows = o.shape[0] * self.num_query_heads
        cute.arch.griddepcontrol_wait()
        if row < rows:
            partials, stats = partial_views(workspace, rows, num_splits, self.head_dim)
            top = -cutlass.Float32.inf
            for split in cutlass.range(num_splits, unroll=4):
                top = cute.arch.fmax(top, stats[0, split, row])
            origin = cutlass.select_(top == -cutlass.Float32.inf, cutlass.Float32(0.0), top)
            total = cutlass.Float32(0.0)
            acc = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
            acc.fill(0.0)
            for split in cutlass.range(num_splits, unroll=4):
                weight = exp2(stats[0, split, row] - origin)
                total += weight * stats[1, split, row]
                values = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
                cute.autovec_copy(partials[None, column // VECTOR, split, row], values)
                for i in cutlass.range_constexpr(VECTOR):
                    acc[i] += weight * values[i]
            token, head = row // self.num_query_heads, row % self.num_query_heads
            scale = output_scale(top, total, sink_logits[head], self.is_softmax_sink)
            out = cute.make_rmem_tensor(VECTOR, self.o_dtype)
            for i in cutlass.range_constexpr(VECTOR):
                out[i] = (acc[i] * scale).to(self.o_dtype)
            target = cute.make_tensor(
                row_pointer(o, token, head) + column, cute.make_layout(VECTOR)
            )
            cute.autovec_copy(out, target)
            if token < lse.shape[0] and column == 0:
                lse[token, head] = row_lse(top, total, stats[2, 0, row])


def partial_views(workspace: cute.Tensor, rows, num_splits, head_dim: int):
    """Partials [4, head_dim / 4, split, row] and their stats [4, split, row] inside the flat workspace."""
    splits, rows = cutlass.Int64(num_splits), cutlass.Int64(rows)
    vectors = head_dim // VECTOR
    pointer = cute.make_ptr(
        cutlass.Float32,
        workspace.iterator.toint(),
        cute.AddressSpace.gmem,
        assumed_align=16,
    )
    partials = cute.make_tensor(
        pointer,
        cute.make_layout(
            (VECTOR, vectors, num_splits, rows), stride=(1, VECTOR, head_dim, splits * head_dim)
        ),
    )
    stats = cute.make_tensor(
        pointer + rows * splits * head_dim,
        cute.make_layout((STATS, num_splits, rows), stride=(1, STATS, splits * STATS)),
    )
    return partials, stats


def row_pointer(tensor: cute.Tensor, token, head) -> cute.Pointer:
    """16-byte aligned address of tensor[token, head, 0]; 64-bit, the tensor may pass 2^31 elements."""
    offset = cutlass.Int64(token) * tensor.stride[0] + cutlass.Int64(head) * tensor.stride[1]
    return cute.make_ptr(
        tensor.element_type,
        (tensor.iterator + offset).toint(),
        cute.AddressSpace.gmem,
        assumed_align=16,
    )


def output_scale(top, total, sink, is_softmax_sink: bool):
    """Factor that turns the accumulated row into the output: 1 / (sum + sink); 0 for a row without keys."""
    denominator = total
    if is_softmax_sink:
        denominator = total + exp2(sink * LOG2_E - top)
    return cutlass.select_(total > 0.0, cute.arch.rcp_approx(denominator), cutlass.Float32(0.0))


def row_lse(top, total, gate_offset):
    """Natural log of the weight that formed the row; -inf for a row without keys."""
    value = (top + cute.math.log2(total, fastmath=True)) * LN_2 + gate_offset
    return cutlass.select_(total > 0.0, value, -cutlass.Float32.inf)
