"""Element formats of tcgen05 operands in shared memory and in TMEM.

Elements of 4 and 6 bits beside 8-bit ones (kinds f8f6f4 and mxf8f6f4) lie in shared memory in
groups of 16, packed and then padded to 16 bytes; in TMEM each has a byte of its own, in the middle:
00xxxx00 or 0xxxxxx0. The kinds of 4-bit elements alone pack two to a byte in both.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.arithmetic import numerics
from dsv4.simulator.arithmetic.numerics import f32, u8, u16, u32

PADDED_GROUP = 16  # elements, and the bytes they take with their padding
# Position of an element in its byte of TMEM, by its bits.
_SHIFT_IN_BYTE = {4: 2, 6: 1}
_UNSIGNED = {8: u8, 16: u16, 32: u32}


class Format:
    """An element type of an operand.

    `bits` of data per element, `run` bytes of shared memory per 16 elements (padded formats use
    16), and a decoder from unsigned codes to float32.
    """

    def __init__(self, bits: int, run: int, decode):
        self.bits, self.run, self.decode = bits, run, decode

    @property
    def unsigned(self) -> type:
        """The numpy type of one element of 8 bits or more."""
        return _UNSIGNED[self.bits]

    def of_packed(self, codes: np.ndarray) -> np.ndarray:
        """Bytes [rows, bytes] of sub-byte elements without padding to float32 [rows, elements]."""
        return self.decode(unpacked(codes, self.bits))

    def of_tmem(self, words: np.ndarray) -> np.ndarray:
        """TMEM words [rows, columns], contiguous, to float32 [rows, elements]."""
        if self.bits >= 8:
            return self.decode(words.view(self.unsigned))
        if self.run < PADDED_GROUP:
            return self.of_packed(words.view(u8).reshape(len(words), -1))
        mask = u8((1 << self.bits) - 1)
        return self.decode(words.view(u8) >> u8(_SHIFT_IN_BYTE[self.bits]) & mask)


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [rows, bytes] of packed 4- or 6-bit elements to one byte each [rows, elements]."""
    if bits == 4:
        pairs = np.stack((codes & u8(15), codes >> u8(4)), -1)
        return pairs.reshape(len(codes), -1)
    # 6 bits: four elements in three bytes.
    triples = codes.reshape(len(codes), -1, 3).astype(u32)
    word = triples[..., 0] | triples[..., 1] << u32(8) | triples[..., 2] << u32(16)
    parts = np.stack([word >> u32(6 * i) & u32(63) for i in range(4)], -1)
    return parts.reshape(len(codes), -1).astype(u8)


def decompressed(rows: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [rows, bytes] of padded groups of 4- or 6-bit elements to their bytes in TMEM."""
    groups = rows.reshape(-1, PADDED_GROUP)[:, : 2 * bits]
    return (unpacked(groups, bits) << u8(_SHIFT_IN_BYTE[bits])).reshape(rows.shape)


def _small(name: str):
    return numerics.SMALL_FLOATS[name].decode


_BYTE_FLOATS = {0: Format(8, 16, _small("e4m3")), 1: Format(8, 16, _small("e5m2"))}
_PADDED_FLOATS = {
    3: Format(6, PADDED_GROUP, _small("e2m3")),
    4: Format(6, PADDED_GROUP, _small("e3m2")),
    5: Format(4, PADDED_GROUP, _small("e2m1")),
}
_PACKED_FP4 = {1: Format(4, 8, _small("e2m1"))}
# By kind and by the format code in the instruction descriptor.
FORMATS = {
    "f16": {
        0: Format(16, 32, numerics.f32_of_f16),
        1: Format(16, 32, numerics.f32_of_bf16),
    },
    "tf32": {2: Format(32, 64, lambda x: (x & u32(0xFFFFE000)).view(f32))},
    "f8f6f4": _BYTE_FLOATS | _PADDED_FLOATS,
    "i8": {
        0: Format(8, 16, lambda x: x.astype(f32)),
        1: Format(8, 16, lambda x: x.view(np.int8).astype(f32)),
    },
    "mxf8f6f4": _BYTE_FLOATS | _PADDED_FLOATS,
    "mxf4": _PACKED_FP4,
    "mxf4nvf4": _PACKED_FP4,
}
# K of one instruction with a dense A.
DEPTH = {
    "f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64,
}  # fmt: skip
