"""Emitters for comparisons."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BlockEmitter, computes, type_of
from dsv4.simulator.compile.registers import KIND_OF_TYPE
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.types import TYPE_BITS

_BITS = ("b8", "b16", "b32", "b64")
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_UNORDERED = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


def _comparison(op: str, a: str, b: str, is_float: bool) -> str:
    if op == "num":
        return f"(({a} == {a}) & ({b} == {b}))"
    if op == "nan":
        return f"(({a} != {a}) | ({b} != {b}))"
    if op == "equ":
        return f"(({a} == {b}) | ({a} != {a}) | ({b} != {b}))"
    if op in _UNORDERED:
        return f"(~({a} {_UNORDERED[op]} {b}))"
    if op == "ne" and is_float:
        return f"(({a} != {b}) & ({a} == {a}) & ({b} == {b}))"
    return f"({a} {_COMPARE[op]} {b})"


@computes("setp", "set")
def set_predicate(e: BlockEmitter, ins: Instruction) -> None:
    name = type_of(ins)
    kind = KIND_OF_TYPE[name]
    if name in ("bf16x2", "f16x2"):
        _compare_pairs(e, ins, name)
        return
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    if name in ("bf16", "f16"):
        a, b = (f"f32_of_{name}({e.value(x, 'u16')})" for x in ins.operands[1:3])
    if "ftz" in ins.parts and name == "f32":
        a, b = f"flush({a})", f"flush({b})"
    compared = _comparison(ins.parts[1], a, b, name[0] in "bf" and name not in _BITS)
    combined = ""
    if ins.parts[2] in ("and", "or", "xor"):
        combined = f" {_LOGIC[ins.parts[2]]} {e.value(ins.operands[3], 'p')}"
    out = f"({compared}{combined})"
    if ins.parts[0] == "set":
        result = ins.parts[2] if ins.parts[2] in TYPE_BITS else ins.parts[3]
        one = "f32(1)" if result == "f32" else "u32(0xffffffff)"
        e.define(ins.operands[0], f"where({out}, {one}, {one[:3]}(0))", KIND_OF_TYPE[result])
    elif "|" in ins.operands[0]:
        first, second = ins.operands[0].split("|")
        both = e.temporary()
        e.line(f"{both} = {compared}")
        e.define(second, f"(~{both}){combined}", "p")
        e.define(first, f"{both}{combined}", "p")
    else:
        e.define(ins.operands[0], out, "p")


def _compare_pairs(e: BlockEmitter, ins: Instruction, name: str) -> None:
    """setp and set of packed halves: a predicate, or 1.0, for each."""
    if ins.parts[2] in ("and", "or", "xor"):
        raise ValueError("combined packed comparison")
    scalar = name.removesuffix("x2")
    a, b = (f"f32_of_{scalar}(words({e.value(x, 'u32')}, u16))" for x in ins.operands[1:3])
    out = e.temporary()
    e.line(f"{out} = {_comparison(ins.parts[1], a, b, True)}")
    if ins.parts[0] == "set":
        if ins.parts[2] == name:
            one = "0x3c00" if scalar == "f16" else "0x3f80"
        else:
            one = {"u32": "0xffff", "s32": "0xffff"}[ins.parts[2]]
        e.define(ins.operands[0], f"where({out}, u16({one}), u16(0)).view(u32)[:, 0]", "u32")
        return
    for k, target in enumerate(ins.operands[0].split("|")):
        e.define(target, f"contiguous({out}[:, {k}])", "p")
