"""mma.sync: products of one warp with operands in registers (m16n8)."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from dsv4.simulator import numerics
from dsv4.simulator.codegen import BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.numerics import f32, f64, i32, u8, u16, u32
from dsv4.simulator.ptx.parser import Instruction
from dsv4.simulator.warp import ALL, Warp

_DECODE = {
    "f16": (u16, numerics.f32_of_f16),
    "bf16": (u16, numerics.f32_of_bf16),
    "tf32": (u32, lambda x: (x & u32(0xFFFFE000)).view(f32)),
    "e4m3": (u8, numerics.SMALL_FLOATS["e4m3"].decode),
    "e5m2": (u8, numerics.SMALL_FLOATS["e5m2"].decode),
    "s8": (u8, lambda x: x.view(np.int8).astype(f32)),
    "u8": (u8, lambda x: x.astype(f32)),
}


@lru_cache(maxsize=16)
def _places(registers: int, per: int, is_a: bool) -> tuple[np.ndarray, np.ndarray]:
    """(row or column of n, k) of the elements [registers, 32, per] of a fragment."""
    r = np.arange(registers)[:, None, None]
    t = np.arange(32)[None, :, None]
    j = np.arange(per)[None, None, :]
    if is_a:  # registers alternate between row halves, then advance along K
        return t // 4 + 8 * (r % 2) + 0 * j, t % 4 * per + 4 * per * (r // 2) + j
    return t // 4 + 0 * r + 0 * j, t % 4 * per + 4 * per * r + j


def _matrix(registers, kind: str, rows: int, depth: int, is_a: bool) -> np.ndarray:
    dtype, decode = _DECODE[kind]
    out = np.empty((rows, depth), f32)
    per = 4 // np.dtype(dtype).itemsize
    values = decode(np.stack([numerics.words(x, dtype) for x in registers]))
    out[_places(len(registers), per, is_a)] = values
    return out


def multiply(w: Warp, form, a, b, c, mask) -> list[np.ndarray]:
    """D = A B + C of one warp; `form` = (K, D type, A type, B type). Registers of D."""
    if mask is not ALL:
        raise KernelFault("mma.sync needs all lanes of the warp")
    depth, d_type, a_type, b_type = form
    left = _matrix(a, a_type, 16, depth, True)
    right = _matrix(b, b_type, 8, depth, False)
    if d_type == "s32":
        product = (left.astype(f64) @ right.T.astype(f64)).astype(i32)
    else:
        product = left @ right.T
    # Register 2h + e of lane 4r + q holds row r + 8h, column 2q + e.
    values = product.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
    if d_type == "f16":
        old = [numerics.f32_of_f16(np.ascontiguousarray(numerics.words(x, u16).T)) for x in c]
        pairs = [numerics.f16_of_f32(values[2 * k : 2 * k + 2] + old[k]) for k in range(2)]
        return [numerics.pack32(p[0], p[1]) for p in pairs]
    dtype = i32 if d_type == "s32" else f32
    return [(value + x.view(dtype)).view(u32) for value, x in zip(values, c)]


@emits("mma.sync")
def emit_multiply(e: BlockEmitter, ins: Instruction) -> None:
    shape = re.fullmatch(r"m16n8k(\d+)", next(p for p in ins.parts if p.startswith("m16n8")))
    if {"sp", "block_scale", "b1"} & set(ins.parts) or "row" not in ins.parts:
        raise ValueError("mma.sync variant")
    types = [p for p in ins.parts if p in (*_DECODE, "f32", "s32")]
    form = (int(shape.group(1)), *types[:3])
    a, b, c = (", ".join(e.value(r, "u32") for r in e.vector(x)) for x in ins.operands[1:4])
    out = e.temporary()
    e.mark()
    e.line(f"{out} = mma_sync(w, {form!r}, ({a},), ({b},), ({c},), {e.mask})")
    for i, register in enumerate(e.vector(ins.operands[0])):
        e.define(register, f"{out}[{i}]", "u32")
