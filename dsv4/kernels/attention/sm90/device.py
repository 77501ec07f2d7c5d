"""Device helpers of the Hopper attention kernel: records, TMA, fragments."""

from collections import namedtuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental import primitives
from cutlass.experimental.cuda.tensor_map import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    create_tensor_map_tiled,
)
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from dsv4.kernels.attention.sm100.combine import row_pointer

SMEM_CAPACITY = 232448  # bytes a CTA can have
SWIZZLE_OF_BYTES = {64: TensorMapSwizzle.s64b, 128: TensorMapSwizzle.s128b}


def frozen(**fields):
    """An immutable record: of a mutable object the tracer carries every field through all loops."""
    return namedtuple("Record", fields)(**fields)


@cute.jit
def make_row_tile_map(
    tensor: cute.Tensor, fallback: cute.Pointer, chunk: cutlass.Constexpr, box: cutlass.Constexpr
):
    """Tensor map of a [batch, row, d] tensor seen as (d % chunk, row, d // chunk, batch).

    Splitting d lets one instruction fetch a tile wider than the swizzle span. Row and batch are
    separate dimensions so that a ragged tile is filled with zeros instead of the next batch's rows.
    L2 promotion is off: 256 B costs 10% of the read bandwidth.

    An empty tensor has no address that a map may hold: it is mapped as one row at `fallback`. A
    guessed block may be loaded from there, though nobody reads it; more rows would reach past what
    is there.
    """
    batch, rows, dim = tensor.shape
    address = tensor.iterator.toint()
    batch_stride, row_stride = cutlass.Int64(tensor.stride[0]), cutlass.Int64(tensor.stride[1])
    batch, rows = cutlass.Int32(batch), cutlass.Int32(rows)
    if cutlass.min(batch, rows) == 0:
        address = fallback.toint()
        batch, rows = cutlass.Int32(1), cutlass.Int32(1)
        batch_stride = cutlass.Int64(dim)
        row_stride = cutlass.Int64(dim)
    units = 128 // tensor.element_type.width
    return create_tensor_map_tiled(
        address,
        tensor.element_type,
        [chunk, rows, dim // chunk, batch],
        [row_stride // units, chunk // units, batch_stride // units],
        [chunk, box[0], box[1] // chunk, 1],
        swizzle=SWIZZLE_OF_BYTES[chunk * tensor.element_type.width // 8],
        l2_promotion=TensorMapL2Promotion.none,
    )


@cute.jit
def make_q_map(
    q: cute.Tensor, tile_rows: cutlass.Int32, chunk: cutlass.Constexpr, box_rows: cutlass.Constexpr
):
    """Tensor map of q [token, head, d] seen as (d % chunk, head % tile_rows, d // chunk,
    head // tile_rows, token): heads of other tiles are out of bounds, and read as zeros."""
    tokens, heads, dim = q.shape
    token_stride, row_stride = cutlass.Int64(q.stride[0]), cutlass.Int64(q.stride[1])
    rows = cutlass.min(tile_rows, heads)
    units = 128 // q.element_type.width
    return create_tensor_map_tiled(
        q.iterator.toint(),
        q.element_type,
        [chunk, rows, dim // chunk, (heads + rows - 1) // rows, tokens],
        [row_stride // units, chunk // units, rows * row_stride // units, token_stride // units],
        [chunk, box_rows, 1, 1, 1],
        swizzle=SWIZZLE_OF_BYTES[chunk * q.element_type.width // 8],
        l2_promotion=TensorMapL2Promotion.none,
    )


def pointer_at(base: cute.Pointer, offset, dtype, align: int = 16) -> cute.Pointer:
    """A global pointer to `dtype`, so many elements of `base` from it, aligned to so many bytes."""
    address = (base + offset).toint()
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def tma_load(tensor_map, smem: cute.Pointer, coordinates, barrier: cute.Pointer):
    """One elected thread fetches a box into `smem`; its bytes are counted on `barrier`."""
    primitives.cp_async_bulk_tensor_shared_cta_global(
        smem.to_llvm_ptr(), tensor_map.get_ptr(), coordinates, barrier.to_llvm_ptr()
    )


def tma_store(tensor_map, smem: cute.Pointer, coordinates):
    """One elected thread writes a box from `smem`; it commits, and waits, by itself."""
    primitives.cp_async_bulk_tensor_global_shared_cta(
        tensor_map.get_ptr(), smem.to_llvm_ptr(), coordinates
    )


def tma_prefetch(tensor_map, coordinates):
    """One elected thread asks for a box to be brought into L2; out of bounds there is nothing."""
    primitives.cp_async_bulk_tensor_prefetch(tensor_map.get_ptr(), coordinates, [])


def make_mma(
    dtype,
    tile,
    b_major: OperandMajorMode,
    is_a_in_registers: bool = False,
    a_major: OperandMajorMode = OperandMajorMode.K,
):
    """wgmma of one warpgroup with fp32 accumulators; tile: M, N."""
    source = warpgroup.OperandSource
    a_source = source.RMEM if is_a_in_registers else source.SMEM
    warpgroups = (1, 1, 1)
    return make_trivial_tiled_mma(
        dtype, dtype, a_major, b_major, cutlass.Float32, warpgroups, tile, a_source
    )


def gemm(mma_of, acc, a, b, steps, first_step_of_a: int, accumulate):
    """Issue acc (+)= a @ b over the given 16-wide K steps; the caller fences, commits and waits.

    The MMA is made here: setting ACCUMULATE changes the object, and a change inside a staged loop
    must not be seen outside it.
    """
    tiled_mma = mma_of()
    for step in steps:
        tiled_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, accumulate)
        a_step = a[None, None, step - first_step_of_a]
        cute.gemm(tiled_mma, acc, a_step, b[None, None, step], acc)
        accumulate = True


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """An m64nN accumulator fragment as [row of the thread (2), column of a pair (2), N / 8]."""
    return cute.make_tensor(
        acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4), stride=(2, 1, 4))
    )


def tree(operation, values):
    """Reduce a list pairwise: the dependent chain is as short as it can be."""
    while len(values) > 1:
        pairs = [operation(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


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

    Rows from `heads` on are padding.
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


def data_pointers(storage, *names: str) -> dict[str, cute.Pointer]:
    """Pointers to fields of a kernel's shared memory, by name."""
    return {name: getattr(storage, name).data_ptr() for name in names}
