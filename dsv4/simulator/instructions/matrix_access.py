"""ldmatrix and stmatrix: small matrices in shared memory, each lane naming one row or column."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.formats import unpacked
from dsv4.simulator.machine.memory import CHUNK
from dsv4.simulator.machine.warp import ALL, Warp


def _matrix_rows(w: Warp, address: np.ndarray, count: int, mask, write: bool) -> np.ndarray:
    """Offsets of 16 bytes by each of the first 8 `count` lanes."""
    if mask is not ALL:
        raise KernelFault("ldmatrix and stmatrix need all 32 lanes")
    rows = address[: 8 * count]
    offsets = rows - w.base
    if int(offsets.max()) + 16 > w.cta.shared_limit:
        raise KernelFault("matrix row outside shared memory")
    if int(np.bitwise_or.reduce(offsets)) & 15:
        raise KernelFault("matrix row not 16-byte aligned")
    if w.launch.monitor is not None:
        w.launch.monitor.shared(w, w.cta, offsets, None, 16, write)
    return offsets


def load_matrix_padded(w: Warp, address, count: int, bits: int, mask) -> list[np.ndarray]:
    """ldmatrix m8n16 of 4- or 6-bit elements, padded to 16 bytes a row: one byte for each."""
    offsets = _matrix_rows(w, address, count, mask, False)
    rows = unpacked(w.cta.rows[offsets >> np.uint32(4)][:, : 2 * bits], bits)
    return list(np.ascontiguousarray(rows).view(np.uint32).reshape(count, 32))


def load_matrix(w: Warp, address, count: int, transposed: bool, mask) -> list[np.ndarray]:
    """ldmatrix m8n8 b16: one uint32 array per matrix."""
    offsets = _matrix_rows(w, address, count, mask, False)
    data = w.cta.chunks[offsets >> np.uint32(4)].view(np.uint16).reshape(count, 8, 8)
    if transposed:
        data = data.transpose(0, 2, 1)
    data = np.ascontiguousarray(data).view(np.uint32).reshape(count, 32)
    return [data[k] for k in range(count)]


def store_matrix(w: Warp, address, values, transposed: bool, mask) -> None:
    """stmatrix m8n8 b16."""
    offsets = _matrix_rows(w, address, len(values), mask, True)
    data = np.concatenate(values).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        data = data.transpose(0, 2, 1)
    w.cta.chunks[offsets >> np.uint32(4)] = np.ascontiguousarray(data).view(CHUNK).reshape(-1)


# Byte j of thread t's register, of a 16 x 8 matrix: (memory row, byte in it). Memory rows are the
# matrix's columns.
_LANE, _BYTE = np.arange(32)[:, None], np.arange(4)[None, :]
_STORED_BYTE = (2 * (_LANE % 4) + _BYTE % 2, _LANE // 4 + 8 * (_BYTE // 2))


def store_matrix_b8(w: Warp, address, values, mask) -> None:
    """stmatrix m16n8 trans b8."""
    offsets = _matrix_rows(w, address, len(values), mask, True)
    for k, value in enumerate(values):
        data = np.empty((8, 16), np.uint8)
        data[_STORED_BYTE] = np.ascontiguousarray(value).view(np.uint8).reshape(32, 4)
        w.cta.rows[offsets[8 * k : 8 * k + 8] >> np.uint32(4)] = data


def load_matrix_b8(w: Warp, address, count: int, bits: int, mask) -> list[np.ndarray]:
    """ldmatrix m16n16 trans b8, or of padded elements of `bits`: two registers per matrix."""
    offsets = _matrix_rows(w, address, 2 * count, mask, False)
    out = []
    for k in range(count):
        rows = w.cta.rows[offsets[16 * k : 16 * k + 16] >> np.uint32(4)]
        tile = (unpacked(rows[:, : 2 * bits], bits) if bits < 8 else rows).T
        words = np.ascontiguousarray(tile).view(np.uint32)  # [16 rows, 4 words]
        out += [words[:8].reshape(32), words[8:].reshape(32)]
    return out
