"""The 128 bytes of a tensor map, as `cuTensorMapEncodeTiled` writes them."""

from __future__ import annotations

import math
import struct

from tests.simulator.hardware.case import InterleavedMap, TensorMap

_ROUND_TO_TF32 = 1 << 9
# Element type -> (bytes, the driver's enumerator, the hardware's code).
ELEMENTS = {
    "u8": (1, 0, 0), "u16": (2, 1, 1), "u32": (4, 2, 2), "s32": (4, 3, 3), "u64": (8, 4, 4),
    "s64": (8, 5, 5), "f16": (2, 6, 6), "f32": (4, 7, 7), "f64": (8, 8, 9), "bf16": (2, 9, 10),
    "f32ftz": (4, 10, 8), "tf32": (4, 11, 7 | _ROUND_TO_TF32),
    "tf32ftz": (4, 12, 8 | _ROUND_TO_TF32),
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def slice_bytes(spec: TensorMap) -> int:
    """Bytes of a slice of channels, 0 for tensors that are not interleaved."""
    return spec.slice_bytes if isinstance(spec, InterleavedMap) else 0


def unit(spec: TensorMap) -> int:
    """Bytes that one step along dimension 0 covers."""
    return slice_bytes(spec) or ELEMENTS[spec.dtype][0]


def box_shape(spec: TensorMap) -> tuple[int, ...]:
    """Units along each dimension that a copy moves."""
    kept = [-(-b // s) for b, s in zip(spec.box, spec.element_strides())]
    if slice_bytes(spec):
        kept[-2] = 1  # of the slices, one
    else:
        kept[0] = spec.box[0]  # the innermost dimension has no stride
    return tuple(kept)


def encode(spec: TensorMap, address: int) -> bytes:
    """The map of `spec` over a buffer that starts at `address`."""
    rank = len(spec.dims)
    _, _, code = ELEMENTS[spec.dtype]
    form = (rank - 1) << 4 | code << 7 | SWIZZLES[spec.swizzle] << 13
    form |= slice_bytes(spec) // 16 << 11
    form |= int(spec.nan_fill) << 15
    strides = [s >> 4 for s in spec.strides] + [0] * (5 - rank)
    dims = [d - 1 for d in spec.dims] + [0] * (5 - rank)
    boxes = [b - 1 for b in spec.box] + [0] * (5 - rank)
    steps = 0
    for i, step in enumerate(spec.element_strides()):
        steps |= (step - 1) << 3 * i
    high = 0
    for i, stride in enumerate(strides):
        high |= (stride >> 32) << 4 * i
    low = [s & 0xFFFFFFFF for s in strides]
    words = [
        address,
        form | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | high << 32,
        dims[0] | dims[1] << 32,
        dims[2] | dims[3] << 32,
        dims[4] | steps << 32 | boxes[0] << 56,
        boxes[1] | boxes[2] << 8 | boxes[3] << 16 | boxes[4] << 24,
    ]
    # Beyond what the hardware reads: bytes of a box, as the driver counts them, and an alignment.
    kept = [b // s for b, s in zip(spec.box, spec.element_strides())]
    volume = math.prod(kept) * ELEMENTS[spec.dtype][0]
    alignment = 8 * spec.swizzle or 16
    return struct.pack("<16Q", *words, volume, alignment, *[0] * 6)
