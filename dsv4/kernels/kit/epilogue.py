"""Epilogue of wgmma accumulators: scale, round, store by rows, through registers or staged."""

import cutlass
from cutlass import cute

from dsv4.kernels.kit.pointers import row_pointer
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES
from dsv4.kernels.kit.wgmma import by_row

WARP_ROWS = 16  # of an m64nN accumulator fragment


@cute.jit
def quad_transpose(words: cute.Tensor, lane_in_quad):
    """Transpose the 4 x 4 matrix of words that four neighbouring lanes hold, one row each."""
    for bit in (1, 2):
        is_upper = lane_in_quad & bit != 0
        for low in range(4):
            if low & bit == 0:
                high = low | bit
                sent = cutlass.select_(is_upper, words[low], words[high])
                got = cute.arch.shuffle_sync_bfly(sent, offset=bit)
                words[low], words[high] = (
                    cutlass.select_(is_upper, got, words[low]),
                    cutlass.select_(is_upper, words[high], got),
                )


@cute.jit
def store_rows(acc: cute.Tensor, o, scales, token, head, column, lane, heads: cutlass.Constexpr):
    """Scale, round and write an accumulator fragment, two rows of a thread from `head` on; 16 bytes
    per thread where a quad can transpose four 8-column groups.

    Args:
        o: [token, head, d], written from `column` on.
        heads: rows from here on are padding.
    """
    rows = by_row(acc)
    groups = cute.size(rows, mode=[2])
    together = 4 if groups % 4 == 0 else 1
    lane_in_quad = lane % 4
    first = lane_in_quad * (2 * together)
    for r in cutlass.range_constexpr(2):
        target = row_pointer(o, token, head + 8 * r) + column + first
        for group in cutlass.range_constexpr(0, groups, together):
            values = cute.make_rmem_tensor(2 * together, o.element_type)
            for j in cutlass.range_constexpr(together):
                for c in cutlass.range_constexpr(2):
                    value = rows[r, c, group + j] * scales[r]
                    values[2 * j + c] = value.to(o.element_type)
            if cutlass.const_expr(together == 4):
                quad_transpose(cute.recast_tensor(values, cutlass.Int32), lane_in_quad)
            if head + 8 * r < heads:
                vector = cute.make_tensor(target + group * 8, cute.make_layout(2 * together))
                cute.autovec_copy(values, vector)


@cute.jit
def stage_rows(acc: cute.Tensor, scales, target: cute.Pointer, lane, dtype: cutlass.Constexpr):
    """Scale, round and write a swizzle span of a warp's rows where TMA expects them."""
    rows = by_row(acc)
    row = lane % WARP_ROWS
    address = target.toint() + row * SPAN_BYTES
    # Four 8 x 8 matrices at a time; each lane holds the address of a row of one of them.
    for pair in cutlass.range_constexpr(cute.size(rows, mode=[2]) // 2):
        values = cute.make_rmem_tensor(8, dtype)
        for i in cutlass.range_constexpr(4):
            for c in cutlass.range_constexpr(2):
                value = rows[i % 2, c, 2 * pair + i // 2] * scales[i % 2]
                values[2 * i + c] = value.to(dtype)
        words = cute.recast_tensor(values, cutlass.Int32)
        vector = (2 * pair + lane // WARP_ROWS) ^ (row % 8)
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address + vector * VECTOR_BYTES, *(words[i] for i in range(4))],
        )


def transpose(word: cutlass.Int32) -> cutlass.Int32:
    """Transpose the 8 x 8 matrix of 16-bit elements that a warp holds, a quad each row."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[cutlass.Int32],
        read_only_args=[word],
    )


def transpose_pair(
    a: cutlass.Float32, b: cutlass.Float32
) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Transpose the 8 x 8 matrix of fp32 that a warp holds, a quad each row, a lane two neighbours
    of it: halves of 16 bits by themselves."""
    upper, lower = cutlass.Uint32(0xFFFF0000), cutlass.Uint32(0xFFFF)
    a, b = (value.bitcast(cutlass.Uint32) for value in (a, b))
    high = cutlass.Uint32(transpose(cutlass.Int32(a >> 16 | b & upper)))
    low = cutlass.Uint32(transpose(cutlass.Int32(a & lower | b << 16)))
    first, second = high << 16 | low & lower, high & upper | low >> 16
    return first.bitcast(cutlass.Float32), second.bitcast(cutlass.Float32)
