"""mma.sync and movmatrix: products of one warp with operands in registers.

All fragments follow one rule. Lane 4 g + q holds row g of A (and g + 8, in the odd registers of
16-row shapes) and column g of B; along K a register holds as many elements as fit, lane q's at
q times as many, and further registers continue 4 lanes later. Of C and D it holds columns 2 q and
2 q + 1 of rows g and g + 8.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from dsv4.simulator.arithmetic import numerics
from dsv4.simulator.arithmetic.numerics import f32, f64, i32, i64, u8, u16, u32, u64
from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.compile.registers import BITS_OF_KIND
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.entry import Instruction


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Bytes [.., n] to their 4-bit halves [.., 2 n], the low one first."""
    return np.stack((codes & u8(15), codes >> u8(4)), -1).reshape(*codes.shape[:-1], -1)


def _signed_nibbles(codes: np.ndarray) -> np.ndarray:
    values = _nibbles(codes).astype(f32)
    return np.where(values > 7, values - f32(16), values)


# Word of a register to look at, and a decoder of [.., words] to values [.., elements].
_DECODE = {
    "f16": (u16, numerics.f32_of_f16),
    "bf16": (u16, numerics.f32_of_bf16),
    "tf32": (u32, lambda x: (x & u32(0xFFFFE000)).view(f32)),
    "f64": (u64, lambda x: x.view(f64)),
    "e4m3": (u8, numerics.SMALL_FLOATS["e4m3"].decode),
    "e5m2": (u8, numerics.SMALL_FLOATS["e5m2"].decode),
    "s8": (u8, lambda x: x.view(np.int8).astype(f32)),
    "u8": (u8, lambda x: x.astype(f32)),
    "s4": (u8, _signed_nibbles),
    "u4": (u8, lambda x: _nibbles(x).astype(f32)),
    "b1": (u8, lambda x: np.unpackbits(x, axis=-1, bitorder="little").astype(f32)),
}
_ROWS = {"m8n8": 8, "m16n8": 16}
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s4": 4, "u4": 4, "b1": 1}  # the others: 8


@lru_cache(maxsize=32)
def _places(registers: int, per: int, halves: int) -> tuple[np.ndarray, np.ndarray]:
    """(row or column of n, k) of the elements [registers, 32, per] of a fragment.

    With 2 `halves` registers alternate between rows g and g + 8, then advance along K.
    """
    r = np.arange(registers)[:, None, None]
    t = np.arange(32)[None, :, None]
    j = np.arange(per)[None, None, :]
    return t // 4 + 8 * (r % halves) + 0 * j, t % 4 * per + 4 * per * (r // halves) + j


def _matrix(registers, kind: str, rows: int, depth: int, halves: int) -> np.ndarray:
    dtype, decode = _DECODE[kind]
    values = decode(np.stack([numerics.words(x, dtype) for x in registers]))
    out = np.empty((rows, depth), values.dtype)
    out[_places(len(registers), values.shape[-1], halves)] = values
    return out


def _product(form, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[rows, 8] of A B, in the accumulator's type or float32."""
    d_type, bitwise = form[2], form[5]
    total = numerics.product(left, right)
    if d_type != "s32":
        return total.astype(left.dtype)
    if bitwise == "xor":  # bits that differ
        total = left.sum(1)[:, None] + right.sum(1)[None, :] - 2 * total
    return total.astype(i64)


def mma_sync(w: Warp, form, saturate: bool, a, b, c, mask) -> list[np.ndarray]:
    """D = A B + C of one warp; `form` = (rows, K, D type, A type, B type, bit operation).

    Returns: registers of D, of the kind of C's.
    """
    if mask is not ALL:
        raise KernelFault("mma.sync needs all lanes of the warp")
    rows, depth, d_type, a_type, b_type, _ = form
    halves = rows // 8
    left = _matrix(a, a_type, rows, depth, halves)
    right = _matrix(b, b_type, 8, depth, 1)
    product = _product(form, left, right)
    # Element 2 h + e of lane 4 g + q is row g + 8 h, column 2 q + e.
    values = product.reshape(halves, 8, 4, 2).transpose(0, 3, 1, 2).reshape(2 * halves, 32)
    if d_type == "f16":
        old = [numerics.f32_of_f16(np.ascontiguousarray(numerics.words(x, u16).T)) for x in c]
        pairs = [numerics.f16_of_f32(values[2 * k : 2 * k + 2] + old[k]) for k in range(halves)]
        return [numerics.pack32(p[0], p[1]) for p in pairs]
    if d_type == "f64":
        return [(value + x.view(f64)).view(u64) for value, x in zip(values, c)]
    if d_type == "s32":
        sums = [value + x.view(i32) for value, x in zip(values, c)]
        if saturate:
            sums = [np.clip(total, -(1 << 31), (1 << 31) - 1) for total in sums]
        return [total.astype(i32).view(u32) for total in sums]
    return [(value + x.view(f32)).view(u32) for value, x in zip(values, c)]


def transpose_matrix(value: np.ndarray, mask) -> np.ndarray:
    """movmatrix: an 8 x 8 matrix of 16-bit elements, two of a row in each lane, transposed."""
    if mask is not ALL:
        raise KernelFault("movmatrix needs all lanes of the warp")
    matrix = np.ascontiguousarray(value).view(u16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T).view(u32).reshape(32)


# Variants that no sm_90a or sm_100a program has, or whose layout is not simulated.
_REFUSED = {
    "sp": "sparse mma.sync", "sp::ordered_metadata": "sparse mma.sync",
    "block_scale": "block-scaled mma.sync exists on sm_120a only",
    **{kind: f"mma.sync {kind} exists on sm_120a only"
       for kind in ("kind::f8f6f4", "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4")},
}  # fmt: skip


@emits("mma")
def emit_multiply(e: BlockEmitter, ins: Instruction) -> None:
    for part in ins.parts:
        if part in _REFUSED:
            raise ValueError(_REFUSED[part])
    shape = re.fullmatch(r"(m\d+n8)k(\d+)", next(p for p in ins.parts if re.match(r"m\d+n", p)))
    types = [p for p in ins.parts if p in (*_DECODE, "f32", "s32")]
    rows, depth = _ROWS[shape.group(1)], int(shape.group(2))
    if "row" not in ins.parts or "col" not in ins.parts or (rows, types[1]) == (8, "f16"):
        raise ValueError("operand layouts other than row and col, and m8n8k4 of f16")
    bitwise = next((p for p in ins.parts if p in ("and", "xor")), "")
    form = (rows, depth, *types[:3], bitwise)
    kind = "u64" if types[0] == "f64" else "u32"
    for operand, name, lines in zip(ins.operands[1:3], types[1:3], (rows, 8)):
        bits = lines * depth * _BITS.get(name, 8)  # of all lanes
        if 32 * BITS_OF_KIND[kind] * len(e.vector(operand)) != bits:
            raise ValueError("register count")
    a, b, c = (", ".join(e.value(r, kind) for r in e.vector(x)) for x in ins.operands[1:4])
    out = e.temporary()
    e.mark()
    saturate = "satfinite" in ins.parts
    e.line(f"{out} = mma_sync(w, {form!r}, {saturate}, ({a},), ({b},), ({c},), {e.mask})")
    for i, register in enumerate(e.vector(ins.operands[0])):
        e.define(register, f"{out}[{i}]", kind)


@emits("movmatrix")
def emit_transpose(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    out = f"transpose_matrix({e.value(ins.operands[1], 'u32')}, {e.mask})"
    e.define(ins.operands[0], out, "u32")
