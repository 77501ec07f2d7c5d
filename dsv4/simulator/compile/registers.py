"""Registers: the kinds of arrays that hold them, and where each register of an entry lives."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from dsv4.simulator.ptx.blocks import Block
from dsv4.simulator.ptx.entry import Entry, Instruction

DTYPES = {
    "p": "bool_", "u8": "u8", "s8": "i8", "u16": "u16", "s16": "i16", "f16": "f16", "u32": "u32",
    "s32": "i32", "f32": "f32", "u64": "u64", "s64": "i64", "f64": "f64", "f32x2": "f32",
}  # fmt: skip
KIND_OF_TYPE = {
    "pred": "p", "b8": "u8", "u8": "u8", "s8": "s8", "b16": "u16", "u16": "u16", "s16": "s16",
    "f16": "f16", "bf16": "u16", "b32": "u32", "u32": "u32", "s32": "s32", "f32": "f32",
    "f16x2": "u32", "bf16x2": "u32", "b64": "u64", "u64": "u64", "s64": "s64", "f64": "f64",
    "f32x2": "f32x2", "b128": "u128",
}  # fmt: skip
BITS_OF_KIND = {
    "p": 1, "u8": 8, "s8": 8, "u16": 16, "s16": 16, "f16": 16, "u32": 32, "s32": 32, "f32": 32,
    "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "u128": 128,
}  # fmt: skip
UNSIGNED = {1: "p", 8: "u8", 16: "u16", 32: "u32", 64: "u64", 128: "u128"}
ZEROS = {
    "p": np.zeros(32, np.bool_), "u8": np.zeros(32, np.uint8), "u16": np.zeros(32, np.uint16),
    "u32": np.zeros(32, np.uint32), "f32": np.zeros(32, np.float32),
    "u64": np.zeros(32, np.uint64), "f32x2": np.zeros(64, np.float32),
    "u128": np.zeros((32, 2), np.uint64),
}  # fmt: skip

REGISTER = re.compile(r"%[\w$]+")


class RegisterMap:
    """Place of each register of an entry in `R`, its canonical kind, and the blocks that use it."""

    def __init__(self, entry: Entry, blocks: list[Block]):
        users: dict[str, set[int]] = {}
        floats: Counter[str] = Counter()
        self.by_block: list[set[str]] = []
        for block in blocks:
            names: set[str] = set()
            for ins in entry.instructions[block.start : block.stop]:
                used = [
                    r
                    for r in REGISTER.findall(" ".join(ins.operands) + " " + (ins.guard or ""))
                    if entry.width(r)
                ]
                names.update(used)
                weight = _float_weight(ins)
                if weight:
                    for r in used:
                        floats[r] += weight
            self.by_block.append(names)
            for r in names:
                users.setdefault(r, set()).add(block.number)
        self.index = {r: i for i, r in enumerate(sorted(users))}
        self.shared = {r for r, where in users.items() if len(where) > 1}
        self.kind = {}
        for r in users:
            bits = entry.width(r)
            kind = UNSIGNED[bits]
            if floats[r] > 0:
                kind = {32: "f32", 64: "f32x2"}.get(bits, kind)
            self.kind[r] = kind
        self.kind.update(_accumulators(entry))
        self.initial = [ZEROS[self.kind[r]] for r in sorted(users)]


def unwritten_reads(entry: Entry) -> list[tuple[Instruction, str]]:
    """Instructions that use a register which no instruction writes, and its name.

    A copy makes another such register; a pack may have a part that is not needed. What stands first
    counts as written, unless it is an address.
    """
    sources: dict[str, set[str]] = {}  # register -> what its writers copy; "" where one computes
    reads: list[tuple[Instruction, list[str]]] = []
    for ins in entry.instructions:
        first, *rest = ins.operands or [""]
        is_address = first.startswith("[")
        used = [ins.guard or "", *rest, *([first] if is_address else [])]
        names = [r for r in REGISTER.findall(" ".join(used)) if entry.width(r)]
        is_copy = ins.parts[0] == "mov" and len(rest) == 1 and rest[0] in names
        for register in () if is_address else REGISTER.findall(first):
            sources.setdefault(register, set()).add(rest[0] if is_copy else "")
        if ins.parts[0] != "mov":
            reads.append((ins, names))
    unwritten = {r for _, names in reads for r in names if r not in sources}
    unwritten |= {r for copied in sources.values() for r in copied if r and r not in sources}
    while unwritten:
        more = {r for r, copied in sources.items() if copied <= unwritten} - unwritten
        if not more:
            break
        unwritten |= more
    found = ((ins, next((r for r in names if r in unwritten), "")) for ins, names in reads)
    return [(ins, register) for ins, register in found if register]


def _accumulators(entry: Entry) -> dict[str, str]:
    """Kinds of wgmma's accumulators: one for all of a product, which takes them as one array, and
    so for all of the products that have a register in common, whatever they add up."""
    groups: list[tuple[set[str], bool]] = []
    for ins in entry.instructions:
        if not ins.opcode.startswith("wgmma.mma_async"):
            continue
        registers, is_float = set(REGISTER.findall(ins.operands[0])), ins.parts[5] == "f32"
        others = []
        for members, has_float in groups:
            if members.isdisjoint(registers):
                others.append((members, has_float))
            else:
                registers, is_float = registers | members, is_float or has_float
        groups = [*others, (registers, is_float)]
    return {r: "f32" if has_float else "u32" for registers, has_float in groups for r in registers}


def _float_weight(ins: Instruction) -> int:
    last = ins.parts[-1]
    if ins.parts[0] in ("mov", "ld", "st", "selp", "cvt", "shfl", "tcgen05"):
        return 0
    if ins.parts[0] == "wgmma":
        return 1 if "f32" in ins.parts else 0
    if last in ("f32", "f32x2"):
        return 1
    return -1
