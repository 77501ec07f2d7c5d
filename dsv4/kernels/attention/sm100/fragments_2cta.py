"""Fragments of the 2-CTA kernel: 128 lanes of TMEM by thread, and rows of bf16 in shared memory.

Every lane of TMEM holds half a row, so that a thread reads its own lane in one load (32x32b) and
row state is a register. What goes between TMEM and global memory goes by 16x256b instead: four
threads have 32 consecutive bytes of a row, a whole sector.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import tcgen05

from dsv4.kernels.attention.sm100.plan_1cta import ROWS
from dsv4.kernels.attention.sm100.plan_2cta import NamedBarriers
from dsv4.kernels.kit.tcgen05 import TMEM_LANES, make_tmem_copy

WARP_ROWS = 32  # rows of which one warp holds a half
UNIT = 8  # bf16 elements of 16 bytes
ROW_UNITS = 8  # of a 128-byte swizzle row
LOADED_ROWS = 4  # of a thread by a load of 16x256b


class Thread(NamedTuple):
    """Softmax or query thread in its warpgroup: TMEM lane `index`, half a row."""

    index: Int32
    warp: Int32
    lane: Int32
    half: Int32  # 0: columns below 256 of O and Q, keys below 32 of S; 1: the others

    @property
    def row(self) -> Int32:
        """Row of the CTA's 64 heads."""
        return self.index % ROWS

    def row_pair_barrier(self) -> pipeline.NamedBarrier:
        """Barrier of the two warps that hold the halves of the same rows."""
        return pipeline.NamedBarrier(self.row_pair_barrier_id(), 2 * cute.arch.WARP_SIZE)

    def row_pair_barrier_id(self) -> Int32:
        return NamedBarriers.EVEN_WARPS + self.warp % 2


def this_thread(first_warp: int) -> Thread:
    """The calling thread, of the warpgroup that starts at a warp."""
    tidx, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tidx // 32) - first_warp
    return Thread(tidx - 32 * first_warp, warp, tidx % 32, warp // 2)


@cute.jit
def any_in_row_pair(thread: Thread, condition: Boolean) -> Boolean:
    """Whether the condition holds for any thread of the two warps of a row pair; synchronises
    them.
    """
    mine = Int32(1) if condition else Int32(0)
    found = cute.arch.inline_ptx(
        "{\n.reg .pred mine, any;\nsetp.ne.s32 mine, {$r1}, 0;\n"
        "barrier.cta.red.or.pred any, {$r0}, 64, mine;\nselp.s32 {$w0}, 1, 0, any;\n}",
        write_only_types=[Int32],
        read_only_args=[thread.row_pair_barrier_id(), mine],
    )
    return found != 0


@cute.jit
def load_lane(
    address: cute.Pointer, columns: cutlass.Constexpr[int], thread: Thread
) -> cute.Tensor:
    """(1, columns) of the thread's lane. Not there before `fence_view_async_tmem_load`."""
    copy, tensor = make_tmem_copy(tcgen05.Ld32x32bOp, columns, columns, address, thread.index)
    coordinates = cute.make_identity_tensor((TMEM_LANES, columns))
    fragment = cute.make_rmem_tensor(copy.partition_D(coordinates).shape, Float32)
    cute.copy(copy, copy.partition_S(tensor), fragment)
    return cute.make_tensor(fragment.iterator, cute.make_layout((1, columns)))


@cute.jit
def scale_lane(
    address: cute.Pointer, columns: cutlass.Constexpr[int], thread: Thread, factor: Float32
):
    """Multiply columns of the thread's lane in place; the caller fences the stores."""
    values = load_lane(address, columns, thread)
    cute.arch.fence_view_async_tmem_load()
    copy, tensor = make_tmem_copy(tcgen05.St32x32bOp, columns, columns, address, thread.index)
    target = copy.partition_D(tensor)
    coordinates = cute.make_identity_tensor((TMEM_LANES, columns))
    scaled = cute.make_rmem_tensor(copy.partition_S(coordinates).shape, Float32)
    for c in cutlass.range_constexpr(columns):
        scaled[c] = values[0, c] * factor
    cute.copy(copy, scaled, target)


@cute.jit
def store_rows(address: cute.Pointer, thread: Thread, values: cute.Tensor):
    """Write values, as `by_rows` views them, to TMEM columns; the caller fences."""
    columns = cute.size(values)
    copy, tensor = make_tmem_copy(tcgen05.St16x256bOp, columns // 8, columns, address, thread.index)
    coordinates = cute.make_identity_tensor((TMEM_LANES, columns))
    layout = cute.make_layout(copy.partition_S(coordinates).shape)
    cute.copy(copy, cute.make_tensor(values.iterator, layout), copy.partition_D(tensor))


def by_rows(fragment: cute.Tensor) -> cute.Tensor:
    """(4, (2, pairs)) view of a 16x256b fragment: rows 8 apart, pairs of columns 8 apart."""
    pairs = cute.size(fragment) // 8
    layout = cute.make_layout(((2, 2), (2, pairs)), stride=((2, 4 * pairs), (1, 4)))
    return cute.make_tensor(fragment.iterator, layout)


def first_of(thread: Thread, row: int) -> tuple[Int32, Int32]:
    """Row of the CTA's 64 and fp32 column, within its half, where `by_rows(...)[row, 0]` lies."""
    return thread.warp % 2 * WARP_ROWS + thread.lane // 4 + 8 * row, thread.lane % 4 * 2


@cute.jit
def store_units(
    tile: cute.Pointer,
    row: Int32,
    first_unit: Int32,
    values: cute.Tensor,
    row_units: cutlass.Constexpr[int] = ROW_UNITS,
):
    """Round values to bf16 into a row of a swizzled tile, 16 bytes at a time.

    Swizzling permutes units so that 8 rows fill all banks.

    Args:
        row_units: of a row: 8 with a 128-byte swizzle, 4 with one of 64.
    """
    units = cute.size(values) // UNIT
    rounded = cute.make_rmem_tensor(cute.make_layout((UNIT, units)), BFloat16)
    by_unit = cute.make_tensor(values.iterator, cute.make_layout((UNIT, units)))
    rounded.store(by_unit.load().to(BFloat16))
    key = row % ROW_UNITS if row_units == ROW_UNITS else row // 2 % row_units
    for i in cutlass.range_constexpr(units):
        unit = row * row_units + ((first_unit + i) ^ key)
        pointer = cute.recast_ptr(tile + cute.assume(unit * UNIT, divby=UNIT), dtype=BFloat16)
        cute.autovec_copy(rounded[None, i], cute.make_tensor(pointer, cute.make_layout(UNIT)))
    # The tensor core and TMA read through another proxy: without the fence they see old bytes.
    cute.arch.fence_view_async_shared()
