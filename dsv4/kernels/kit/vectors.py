"""Vectors of neighbouring elements in global memory, by address: 64-bit arithmetic done once."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Int32, Int64, Uint32, cute

LINE_BYTES = 128  # of L2


def address_of(tensor: cute.Tensor, offset: Int64) -> Int64:
    """Address of an element."""
    return (tensor.iterator + offset).toint()


def pointer_to(address: Int64, dtype: type, align: int) -> cute.Pointer:
    """Global pointer of an address that is a multiple of `align` bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def vector_at(address: Int64, dtype: type, element: int | Int32, count: int = 8) -> cute.Tensor:
    """`count` elements, `element` elements past an address, aligned to their size or to 16 bytes.

    Eight bf16 are what one load takes.
    """
    size = dtype.width // 8
    pointer = pointer_to(address + element * size, dtype, min(16, count * size))
    return cute.make_tensor(pointer, cute.make_layout(count))


def prefetch_l2(address: Int64) -> None:
    """The calling thread asks for the line of an address to be brought into L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def in_registers(words: Sequence[Uint32]) -> cute.Tensor:
    """The words as a tensor."""
    tensor = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        tensor[i] = word
    return tensor
