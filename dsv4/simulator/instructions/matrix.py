"""ldmatrix and stmatrix: small matrices in shared memory, each lane naming one row or column."""

from __future__ import annotations

import re

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits, type_of
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.formats import unpacked
from dsv4.simulator.machine.memory import CHUNK
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.entry import Instruction


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


# --- emitters ------------------------------------------------------------------------------------
def _padded_bits(ins: Instruction, default: int | None = None) -> int:
    """Bits of elements that are padded to 16 bytes a row."""
    for name, bits in (("b4x16_p64", 4), ("b6x16_p32", 6)):
        if name in ins.parts:
            return bits
    if default is None:
        raise ValueError("ldmatrix shape")
    return default


@emits("ldmatrix")
def emit_load(e: BlockEmitter, ins: Instruction) -> None:
    count = next(int(p[1:]) for p in ins.parts if re.fullmatch(r"x[124]", p))
    address = e.address(ins.operands[1], "u32")
    out = e.temporary()
    e.mark()
    if "m8n8" in ins.parts:
        trans = "trans" in ins.parts
        e.line(f"{out} = load_matrix(w, {address}, {count}, {trans}, {e.mask})")
    elif "m16n16" in ins.parts and "trans" in ins.parts:
        e.line(f"{out} = load_matrix_b8(w, {address}, {count}, {_padded_bits(ins, 8)}, {e.mask})")
    elif "m8n16" in ins.parts:
        bits = _padded_bits(ins)
        e.line(f"{out} = load_matrix_padded(w, {address}, {count}, {bits}, {e.mask})")
    else:
        raise ValueError("ldmatrix shape")
    for i, target in enumerate(e.vector(ins.operands[0])):
        e.define(target, f"{out}[{i}]", "u32")


@emits("stmatrix")
def emit_store(e: BlockEmitter, ins: Instruction) -> None:
    values = ", ".join(e.value(v, "u32") for v in e.vector(ins.operands[1]))
    address = e.address(ins.operands[0], "u32")
    e.mark()
    if "m16n8" in ins.parts and type_of(ins) == "b8" and "trans" in ins.parts:
        e.line(f"store_matrix_b8(w, {address}, ({values},), {e.mask})")
        return
    if "m8n8" not in ins.parts or type_of(ins) != "b16":
        raise ValueError("stmatrix shape")
    e.line(f"store_matrix(w, {address}, ({values},), {'trans' in ins.parts}, {e.mask})")
