"""Device helpers of the Hopper attention kernel: TMA, fragments, row reductions."""

import cutlass
from cutlass import cute
from cutlass.experimental import primitives
from cutlass.experimental.cuda.tensor_map import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    create_tensor_map_tiled,
)

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

SWIZZLE_OF_BYTES = {64: TensorMapSwizzle.s64b, 128: TensorMapSwizzle.s128b}


@cute.jit
def make_row_tile_map(
    tensor: cute.Tensor, fallback: cute.Pointer, chunk: cutlass.Constexpr, box: cutlass.Constexpr
):
    """Tensor map of a [batch, row, d] tensor seen as (d % chunk, row, d // chunk, batch).

    Splitting d lets one instruction fetch a tile wider than the swizzle span. Row and batch are
    separate dimensions so that a ragged tile is filled with zeros instead of the next batch's rows.
    L2 promotion is off: 256 B costs 10% of the read bandwidth.

    An empty tensor has no address that a map may hold: it is mapped as one row at `fallback`,
    which nobody loads.
    """
    batch, rows, dim = tensor.shape
    address = tensor.iterator.toint()
    batch_stride, row_stride = cutlass.Int64(tensor.stride[0]), cutlass.Int64(tensor.stride[1])
    if batch * rows == 0:
        address = fallback.toint()
        batch_stride = cutlass.Int64(dim)
        row_stride = cutlass.Int64(dim)
    units = 128 // tensor.element_type.width
    return create_tensor_map_tiled(
        address,
        tensor.element_type,
        [chunk, cutlass.max(rows, 1), dim // chunk, cutlass.max(batch, 1)],
        [row_stride // units, chunk // units, batch_stride // units],
        [chunk, box[0], box[1] // chunk, 1],
        swizzle=SWIZZLE_OF_BYTES[chunk * tensor.element_type.width // 8],
        l2_promotion=TensorMapL2Promotion.none,
    )


def tma_load(tensor_map, smem: cute.Pointer, row, chunk, batch, barrier: cute.Pointer):
    """One elected thread fetches a box into `smem`; its bytes are counted on `barrier`."""
    primitives.cp_async_bulk_tensor_shared_cta_global(
        smem.to_llvm_ptr(), tensor_map.get_ptr(), [0, row, chunk, batch], barrier.to_llvm_ptr()
    )


def gemm(make_mma, acc, a, b, steps, first_step_of_a: int, accumulate):
    """Issue acc (+)= a @ b over the given 16-wide K steps; the caller fences, commits and waits.

    The MMA is made here: setting ACCUMULATE changes the object, and a change inside a staged loop
    must not be seen outside it.
    """
    tiled_mma = make_mma()
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


def quad_max(value):
    """Maximum over the four threads that share an accumulator row."""
    return cute.arch.warp_reduction_max(value, threads_in_group=4)


def quad_sum(value):
    """Sum over the four threads that share an accumulator row."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=4)


def exp2(value):
    return cute.math.exp2(value, fastmath=True)


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
