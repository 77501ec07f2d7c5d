"""Tensor maps of TMA for code that makes them itself, not through compiled host functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from dsv4.simulator.frontend.stub_library import stub_library

_RANKS = 5
MAP_WORDS = 16


def encode_tiled(
    dtype: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int] = (),
    interleave: int = 0,
    swizzle: int = 0,
    fill: int = 0,
) -> bytes:
    """The 128 bytes of a map, as the driver's cuTensorMapEncodeTiled makes them.

    Args:
        dtype, interleave, swizzle, fill: the driver's numbers.
        address: of the tensor in global memory.
        dims: sizes, innermost first.
        strides: bytes, of all dimensions but the innermost.
        box, steps: sizes of what a copy moves, and element strides (default: ones).

    Raises: ValueError for what the driver refuses.
    """
    words = (ctypes.c_uint64 * MAP_WORDS)()
    rank = len(dims)
    sizes = [(kind * _RANKS)(*values) for kind, values in (
        (ctypes.c_uint64, dims), (ctypes.c_uint64, strides), (ctypes.c_uint32, box),
        (ctypes.c_uint32, steps or [1] * rank),
    )]  # fmt: skip
    status = ctypes.CDLL(stub_library()).dsv4sim_cuTensorMapEncodeTiled(
        words, dtype, rank, ctypes.c_void_p(address), *sizes, interleave, swizzle, 2, fill
    )
    if status:
        raise ValueError(
            f"no tensor map of type {dtype} at {address:#x}, sizes {list(dims)}, strides "
            f"{list(strides)} bytes, box {list(box)}, swizzle {swizzle}"
        )
    return bytes(words)
