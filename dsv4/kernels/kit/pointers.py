"""Global pointers by element offset, which may lie past 2^31 elements."""

import cutlass
from cutlass import cute


def pointer_at(base: cute.Pointer, offset, dtype, align: int = 16) -> cute.Pointer:
    """Pointer to `dtype`, `offset` elements of `base` from it.

    Args:
        align: bytes that the address is a multiple of.
    """
    address = (base + offset).toint()
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def row_pointer(tensor: cute.Tensor, token, head) -> cute.Pointer:
    """16-byte aligned address of tensor[token, head, 0]."""
    offset = cutlass.Int64(token) * tensor.stride[0] + cutlass.Int64(head) * tensor.stride[1]
    return pointer_at(tensor.iterator, offset, tensor.element_type)
