"""Swizzled operands in shared memory: atoms, rows cleared and written by 16-byte vectors.

A swizzle span is a row of 32, 64 or 128 bytes. Swizzling permutes the 16-byte vectors of a span, so
that whole rows may be cleared without regard to it.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental.cuda.tensor_map import TensorMapSwizzle

SPAN_BYTES = 128  # of the widest swizzle
VECTOR_BYTES = 16  # that a swizzle leaves together
# By the bytes of a span.
TENSOR_MAP_SWIZZLES = {
    32: TensorMapSwizzle.s32b,
    64: TensorMapSwizzle.s64b,
    128: TensorMapSwizzle.s128b,
}
ATOMS = {64: "SW64", 128: "SW128"}


def operand_atoms(dtype, span_bytes: int):
    """The K-major and the MN-major layout atom of operands in spans of so many bytes."""
    kinds = warpgroup.SmemLayoutAtomKind
    k_major, mn_major = (getattr(kinds, f"{major}_{ATOMS[span_bytes]}") for major in ("K", "MN"))
    return (
        warpgroup.make_smem_layout_atom(k_major, dtype),
        warpgroup.make_smem_layout_atom(mn_major, dtype),
    )


@cute.jit
def clear_rows(
    tile: cute.Pointer, rows: cutlass.Constexpr, columns: cutlass.Constexpr, first,
    chunk: cutlass.Constexpr, thread, dtype: cutlass.Constexpr,
):  # fmt: skip
    """Clear the rows from `first` on of a tile, with the 128 threads of a warpgroup, and fence for
    the async proxy: masked rows of V meet P = 0, but 0 * NaN is NaN.

    Args:
        tile: [columns // chunk, rows, chunk], swizzled within the chunks.
    """
    vectors_per_row = chunk // 8
    shape = (8, rows * vectors_per_row, columns // chunk)
    vectors = cute.make_tensor(tile, cute.make_layout(shape))
    zero = cute.make_rmem_tensor(8, dtype)
    zero.fill(0.0)
    begin = first * vectors_per_row + thread
    for i in cutlass.range(begin, cute.size(vectors, mode=[1]), 128, unroll=1):
        for j in cutlass.range_constexpr(cute.size(vectors, mode=[2])):
            cute.autovec_copy(zero, vectors[None, i, j])
    cute.arch.fence_view_async_shared()
