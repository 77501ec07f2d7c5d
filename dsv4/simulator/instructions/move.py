"""Emitters for moves between registers, selects, and addresses in other CTAs."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BlockEmitter, computes, emits, type_of
from dsv4.simulator.compile.registers import DTYPES, KIND_OF_TYPE, UNSIGNED
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.types import TYPE_BITS


@computes("selp")
def select(e: BlockEmitter, ins: Instruction) -> None:
    kind = _move_kind(e, ins.operands[1:3], KIND_OF_TYPE[type_of(ins)])
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    e.define(ins.operands[0], f"where({e.value(ins.operands[3], 'p')}, {a}, {b})", kind)


def _move_kind(e: BlockEmitter, sources: list[str], kind: str) -> str:
    """Keep float registers float when bits are only moved: fewer views."""
    if kind == "u32" and any(e.entry.width(s) and "f32" in e.kinds(s) for s in sources):
        return "f32"
    return kind


@computes("mov")
def move(e: BlockEmitter, ins: Instruction) -> None:
    target, source = ins.operands
    name = type_of(ins)
    bits = TYPE_BITS[name]
    if name == "b128":
        _move_128(e, target, source)
    elif target.startswith("{"):
        parts = e.vector(target)
        unsigned = UNSIGNED[bits // len(parts)]
        split = e.temporary()
        e.line(f"{split} = words({e.value(source, UNSIGNED[bits])}, {DTYPES[unsigned]})")
        for i, register in enumerate(parts):
            if register != "_":
                e.define(register, f"{split}[:, {i}]", unsigned)
    elif source.startswith("{"):
        parts = e.vector(source)
        unsigned = UNSIGNED[bits // len(parts)]
        if len(parts) == 2:
            kinds = unsigned, UNSIGNED[bits]
            e.elementwise(target, f"pack{bits}({{}}, {{}})", parts, kinds, broadcasts=False)
        else:
            stacked = ", ".join(e.value(p, unsigned) for p in parts)
            dtype = DTYPES[UNSIGNED[bits]]
            e.define(target, f"np.stack(({stacked}), 1).view({dtype})[:, 0]", UNSIGNED[bits])
    else:
        kind = _move_kind(e, [source], KIND_OF_TYPE[name])
        e.define(target, e.value(source, kind), kind)


def _move_128(e: BlockEmitter, target: str, source: str) -> None:
    if target.startswith("{"):
        value = e.value(source, "u128")
        for i, register in enumerate(e.vector(target)):
            if register != "_":
                e.define(register, f"contiguous({value}[:, {i}])", "u64")
    elif source.startswith("{"):
        low, high = (e.value(p, "u64") for p in e.vector(source))
        e.define(target, f"np.stack(({low}, {high}), 1)", "u128")
    else:
        e.define(target, e.value(source, "u128"), "u128")


@emits("mapa")
def map_address(e: BlockEmitter, ins: Instruction) -> None:
    """The same offset in the CTA of another rank."""
    wide = type_of(ins) == "u64"
    kind = "u64" if wide else "u32"
    address, rank = e.value(ins.operands[1], kind), e.value(ins.operands[2], "u32")
    dtype = DTYPES[kind]
    shifted = f"({rank}.astype({dtype}) << {dtype}(24))"
    keep = "0xff00000000ffffff" if wide else "0xffffff"
    e.define(ins.operands[0], f"({address} & {dtype}({keep})) | {shifted}", kind)


@emits("getctarank")
def cta_rank(e: BlockEmitter, ins: Instruction) -> None:
    address = e.value(ins.operands[1], KIND_OF_TYPE[type_of(ins)])
    e.define(ins.operands[0], f"(({address} >> 24) & 0xff).astype(u32)", "u32")
