"""Emitters for tcgen05 instructions."""

from __future__ import annotations

import re

from dsv4.simulator.compile.codegen import BLOCKED, BlockEmitter, emits
from dsv4.simulator.instructions.tcgen05 import REGISTERS_PER_REPEAT, copy_lanes
from dsv4.simulator.ptx.entry import Instruction


def _group(ins: Instruction) -> int:
    return 2 if "cta_group::2" in ins.parts else 1


@emits("tcgen05.alloc")
def allocate(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    target, columns = e.address(ins.operands[0], "u32"), e.value(ins.operands[1], "u32")
    e.line(
        f"if not allocate(w, {target}, {columns}, {_group(ins)}, store_shared): return {BLOCKED}"
    )


@emits("tcgen05.dealloc")
def deallocate(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    start, columns = (e.value(operand, "u32") for operand in ins.operands[:2])
    e.line(f"deallocate(w, {start}, {columns}, {_group(ins)})")


@emits("tcgen05.relinquish_alloc_permit")
def relinquish(e: BlockEmitter, ins: Instruction) -> None:
    e.line("relinquish(w)")


@emits("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"fence(w, {ins.opcode!r}, {e.mask})")


@emits("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"tmem_wait(w, {ins.parts[1][-2:]!r})")


def _shape(ins: Instruction) -> tuple[str, int]:
    shape = next(p for p in ins.parts if p in REGISTERS_PER_REPEAT)
    repeats = next(int(p[1:]) for p in ins.parts if re.fullmatch(r"x\d+", p))
    return shape, repeats


@emits("tcgen05.ld")
def load(e: BlockEmitter, ins: Instruction) -> None:
    if "red" in ins.parts:
        raise ValueError("tcgen05.ld.red exists on sm_103a and sm_101a only, not on sm_100a")
    e.mark()
    shape, repeats = _shape(ins)
    registers = e.vector(ins.operands[0])
    if len(registers) != repeats * REGISTERS_PER_REPEAT[shape]:
        raise ValueError("register count")
    half = int(ins.operands[2], 0) if len(ins.operands) > 2 else 0
    packed = "pack::16b" in ins.parts
    indices = tuple(e.registers.index[r] for r in registers)
    address = e.address(ins.operands[1], "u32")
    e.line(f"tmem_load(w, {address}, {shape!r}, {repeats}, {half}, {packed}, {indices}, {e.mask})")


@emits("tcgen05.st")
def store(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    shape, repeats = _shape(ins)
    registers = e.vector(ins.operands[-1])
    if len(registers) != repeats * REGISTERS_PER_REPEAT[shape]:
        raise ValueError("register count")
    half = int(ins.operands[1], 0) if len(ins.operands) > 2 else 0
    packed = "unpack::16b" in ins.parts
    values = ", ".join(e.value(r, "u32") for r in registers)
    address = e.address(ins.operands[0], "u32")
    e.line(
        f"tmem_store(w, {address}, {shape!r}, {repeats}, {half}, {packed}, ({values},), {e.mask})"
    )


# Block scales per row of one instruction, by name of the block size and kind.
_SCALES = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
_DEFAULT_SCALES = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}


def _scales_per_row(ins: Instruction, kind: str) -> int:
    for part in ins.parts:
        if part in _SCALES:
            return _SCALES[part]
        if part in ("block16", "block32"):
            return {"mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}[kind] // int(part[5:])
    return _DEFAULT_SCALES[kind]


@emits("tcgen05.mma")
def multiply(e: BlockEmitter, ins: Instruction) -> None:
    if "sp" in ins.parts:
        raise ValueError("sparse tcgen05.mma")
    e.mark()
    kind = next(p for p in ins.parts if p.startswith("kind::")).removeprefix("kind::")
    stationary = "ws" in ins.parts
    a_in_tmem = ins.operands[1].startswith("[")
    d = e.address(ins.operands[0], "u32")
    a = e.address(ins.operands[1], "u32") if a_in_tmem else e.value(ins.operands[1], "u64")
    b, bits = e.value(ins.operands[2], "u64"), e.value(ins.operands[3], "u32")
    rest = ins.operands[4:]
    disabled, scales, shift, zero_mask = "", "None", None, "None"
    if "block_scale" in ins.parts:
        places = ", ".join(e.address(x, "u32") for x in rest[:2])
        scales = f"({places}, {_scales_per_row(ins, kind)})"
        rest = rest[2:]
    elif rest[0].startswith("{"):
        disabled = "".join(f"{e.value(x, 'u32')}, " for x in e.vector(rest[0]))
        rest = rest[1:]
    accumulate = e.value(rest[0], "p")
    if len(rest) > 1 and not stationary:
        shift = int(rest[1], 0)
    elif len(rest) > 1:
        zero_mask = e.value(rest[1], "u64")
    e.line(
        f"issue_multiply(w, {_group(ins)}, {kind!r}, {d}, {a}, {a_in_tmem}, {b}, {bits}, "
        f"{accumulate}, ({disabled}), {stationary}, {scales}, {shift}, {zero_mask}, "
        f"{'ashift' in ins.parts}, {e.mask})"
    )


@emits("tcgen05.cp")
def copy(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    form = ".".join(p for p in ins.parts if re.fullmatch(r"\d+x\d+b|warpx.*", p))
    copy_lanes(form)  # a KeyError, if there is no such form
    bits = next((_PADDED[p] for p in ins.parts if p in _PADDED), 0)
    target, descriptor = e.address(ins.operands[0], "u32"), e.value(ins.operands[1], "u64")
    e.line(f"issue_copy(w, {_group(ins)}, {form!r}, {bits}, {target}, {descriptor}, {e.mask})")


_PADDED = {"b6x16_p32": 6, "b4x16_p64": 4}  # bits of the elements that a copy spreads over bytes


@emits("tcgen05.shift")
def shift(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"issue_shift(w, {_group(ins)}, {e.address(ins.operands[0], 'u32')}, {e.mask})")


@emits("tcgen05.commit")
def commit(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    barrier = e.address(ins.operands[0], "u32")
    multicast = e.value(ins.operands[1], "u16") if len(ins.operands) > 1 else "None"
    e.line(f"commit(w, {_group(ins)}, {barrier}, {multicast}, {e.mask})")
