"""Shared-memory matrix descriptors of tcgen05 and wgmma, and the elements they address.

Canonical layouts, T = elements in 16 bytes, span = the swizzle's 128, 64 or 32 bytes:
- K-major, swizzled: rows of `span` bytes, 8 rows per group, groups `stride` bytes apart;
- K-major, plain: 8 x 16-byte core matrices, `leading` apart along K, `stride` apart along rows;
- MN-major, swizzled: runs of `span` bytes along MN, `leading` apart; 8 K rows per group of
  8 * span bytes, groups `stride` apart;
- MN-major, plain: 16-byte runs along MN `stride` apart, 8 K rows per core matrix, `leading` apart.
The swizzle XORs bits of the absolute address, so a descriptor may start inside a swizzle atom. The
128-byte swizzle that keeps 32 bytes together repeats after 4 rows, which are its group of K rows in
MN-major operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.tensor_map import swizzled
from dsv4.simulator.machine.memory import SHARED_BYTES, Cta

# Swizzle modes: (span, bytes kept together).
_TCGEN05_SWIZZLE = {0: (0, 16), 1: (128, 32), 2: (128, 16), 4: (64, 16), 6: (32, 16)}
_WGMMA_SPAN = {0: 0, 1: 128, 2: 64, 3: 32}


@dataclass(frozen=True)
class MatrixDescriptor:
    """Byte addresses and strides of one operand tile in shared memory."""

    start: int
    leading: int
    stride: int
    span: int
    atom: int = 16  # bytes the swizzle keeps together

    @classmethod
    @lru_cache(maxsize=4096)
    def tcgen05(cls, bits: int) -> MatrixDescriptor:
        """Decode the 64-bit descriptor of tcgen05.mma."""
        mode = bits >> 61
        if mode not in _TCGEN05_SWIZZLE:
            raise KernelFault(f"matrix descriptor {bits:#x}: there is no swizzle mode {mode}")
        if bits >> 52 & 1:
            raise KernelFault(
                f"matrix descriptor {bits:#x}: absolute leading addresses exist on sm_103a only"
            )
        return cls._decode(bits, *_TCGEN05_SWIZZLE[mode])

    @classmethod
    @lru_cache(maxsize=4096)
    def wgmma(cls, bits: int) -> MatrixDescriptor:
        """Decode the 64-bit descriptor of wgmma."""
        return cls._decode(bits, _WGMMA_SPAN[bits >> 62], 16)

    @classmethod
    def _decode(cls, bits: int, span: int, atom: int) -> MatrixDescriptor:
        if bits >> 49 & 7:
            raise KernelFault(f"matrix descriptor {bits:#x}: base offset is not simulated")
        return cls(
            (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, span, atom
        )


@lru_cache(maxsize=4096)
def element_index(
    descriptor: MatrixDescriptor, rows: int, depth: int, size: int, k_major: bool
) -> np.ndarray:
    """Element offsets (in units of `size` bytes) of [rows (M or N), depth (K)] of an operand."""
    d = descriptor
    i = np.arange(rows)[:, None]
    k = np.arange(depth)[None, :]
    unit = 16 // size
    if k_major:
        if d.span:
            address = d.start + i // 8 * d.stride + i % 8 * d.span + k * size
        else:
            address = d.start + i // 8 * d.stride + i % 8 * 16 + k // unit * d.leading
            address = address + k % unit * size
    elif d.span:
        run = d.span // size
        address = d.start + i % run * size + i // run * d.leading
        group = 128 // d.atom  # K rows
        address = address + k % group * d.span + k // group * d.stride
    else:
        address = d.start + i % unit * size + i // unit * d.stride
        address = address + k % 8 * 16 + k // 8 * d.leading
    address = swizzled(address, d.span, d.atom)
    if int(address.max()) + size > SHARED_BYTES:
        raise KernelFault(
            f"matrix operand reaches shared offset {int(address.max()):#x}, past the end"
        )
    return np.ascontiguousarray(address // size)


@lru_cache(maxsize=4096)
def _chunk_index(
    descriptor: MatrixDescriptor, rows: int, depth: int, size: int, k_major: bool
) -> np.ndarray | None:
    """The 16-byte chunks of an operand, [rows, chunks of K] or, MN-major, [depth, chunks of rows];
    None if it does not fill its last ones."""
    unit = 16 // size
    if (depth if k_major else rows) % unit:
        return None
    index = element_index(descriptor, rows, depth, size, k_major)
    first = index[:, ::unit] if k_major else index[::unit].T
    return np.ascontiguousarray(first * size >> 4)


def operand_elements(
    cta: Cta, descriptor: MatrixDescriptor, rows: int, depth: int, dtype: type, size: int,
    k_major: bool,
) -> np.ndarray:  # fmt: skip
    """[rows, depth] of an operand in shared memory, as unsigned integers of `size` bytes."""
    index = _chunk_index(descriptor, rows, depth, size, k_major)
    if index is None:
        return cta.views[dtype].take(element_index(descriptor, rows, depth, size, k_major))
    elements = cta.chunks[index].view(dtype)
    return elements if k_major else np.ascontiguousarray(elements.T)
