"""Accumulator fragments of the 1-CTA kernel: 64 columns from and to TMEM, and to shared memory.

TMEM is read and written in one shape, 16x256b, the one that matches a 64-row accumulator (16 of
every 32 lanes). It gives a thread 2 rows x 16 columns. Mixing shapes, or writing back with an atom
that was not made for the same columns, permutes values without any error.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.attention.sm100.plan_1cta import ROWS
from dsv4.kernels.attention.sm100.work_tile import COLUMNS


class Copies(NamedTuple):
    """Partitions of (64, 64) accumulator columns by thread."""

    load: cute.TiledCopy  # TMEM to registers
    store: cute.TiledCopy  # registers to TMEM
    to_smem: cute.TiledCopy  # registers to shared memory, by stmatrix
    thread: Int32


def make_copies(columns: cute.Tensor) -> Copies:
    """Copies for `columns`, (64, 64) of a TMEM accumulator, and for any others of the same
    layout.
    """
    tidx, _, _ = cute.arch.thread_idx()
    repeat = tcgen05.Repetition(COLUMNS // 8)
    load, store = [
        tcgen05.make_tmem_copy(cute.make_copy_atom(op(repeat), Float32), columns)
        for op in (tcgen05.Ld16x256bOp, tcgen05.St16x256bOp)
    ]
    stmatrix = sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, BFloat16, Float32, load)
    to_smem = cute.make_tiled_copy_D(stmatrix, load)
    return Copies(load.get_slice(tidx), store.get_slice(tidx), to_smem, tidx)


def new_fragment(copies: Copies, dtype=Float32) -> cute.Tensor:
    """Registers for this thread's part."""
    columns = cute.make_identity_tensor((ROWS, COLUMNS))
    return cute.make_rmem_tensor(copies.load.partition_D(columns).shape, dtype)


def by_rows(fragment: cute.Tensor) -> cute.Tensor:
    """(2, 16) view: registers run over column pairs, then rows, then groups of 8 columns."""
    layout = cute.make_layout((2, (2, COLUMNS // 8)), stride=(2, (1, 4)))
    return cute.make_tensor(fragment.iterator, layout)


@cute.jit
def load_columns(copies: Copies, columns: cute.Tensor) -> cute.Tensor:
    """Fragment of (64, 64) accumulator columns, complete on return."""
    fragment = new_fragment(copies)
    cute.copy(copies.load, copies.load.partition_S(columns), fragment)
    cute.arch.fence_view_async_tmem_load()
    return fragment


@cute.jit
def store_columns(copies: Copies, fragment: cute.Tensor, columns: cute.Tensor):
    """Write a fragment back to the columns it came from; the caller fences."""
    cute.copy(copies.store, fragment, copies.store.partition_D(columns))


@cute.jit
def scale_rows(fragment: cute.Tensor, factor: cute.Tensor):
    """Multiply each of the two rows by its factor."""
    rows = by_rows(fragment)
    for row in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[row, i] = rows[row, i] * factor[row]


@cute.jit
def store_rows(copies: Copies, fragment: cute.Tensor, target: cute.Tensor):
    """Round a fragment to bf16 into a swizzled (64, 64) tile of shared memory."""
    rounded = new_fragment(copies, BFloat16)
    rounded.store(fragment.load().to(BFloat16))
    cute.copy(
        copies.to_smem,
        copies.to_smem.retile(rounded),
        copies.to_smem.get_slice(copies.thread).partition_D(target),
    )
    # The tensor core and TMA read through another proxy: without the fence they see old bytes.
    cute.arch.fence_view_async_shared()
