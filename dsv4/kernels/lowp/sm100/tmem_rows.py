"""Rows of Tensor Memory, a lane a thread: neighbouring columns to registers, and back."""

from __future__ import annotations

from cutlass import Float32, cute
from cutlass.cute.nvgpu import tcgen05

from dsv4.kernels.kit.tcgen05 import TMEM_LANES, make_tmem_copy


def load_row(address: cute.Pointer, values: cute.Tensor) -> None:
    """Ask for the thread's lane of as many columns as there are values: there after the fence of
    TMEM loads."""
    copy, tensor, shape = _copy(tcgen05.Ld32x32bOp, address, cute.size(values))
    words = cute.recast_tensor(values, Float32)
    cute.copy(copy, copy.partition_S(tensor), cute.make_tensor(words.iterator, shape))


def store_row(address: cute.Pointer, values: cute.Tensor) -> None:
    """Write the thread's lane; the caller fences."""
    copy, tensor, shape = _copy(tcgen05.St32x32bOp, address, cute.size(values))
    cute.copy(copy, cute.make_tensor(values.iterator, shape), copy.partition_D(tensor))


def _copy(op, address: cute.Pointer, columns: int):
    """A thread's part of a copy, the columns in TMEM, and the layout of its registers."""
    thread = cute.arch.thread_idx()[0] % TMEM_LANES
    copy, tensor = make_tmem_copy(op, columns, columns, address, thread)
    coordinates = cute.make_identity_tensor((TMEM_LANES, columns))
    part = copy.partition_D if op is tcgen05.Ld32x32bOp else copy.partition_S
    return copy, tensor, cute.make_layout(part(coordinates).shape)
