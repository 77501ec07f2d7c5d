"""Emitters for integer and logic instructions."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BlockEmitter, computes, type_of
from dsv4.simulator.compile.registers import BITS_OF_KIND, DTYPES, KIND_OF_TYPE, UNSIGNED
from dsv4.simulator.instructions.floats import (
    float_binary,
    is_mixed,
    is_packed_half,
    mixed_precision,
    packed_half,
)
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.types import TYPE_BITS

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


@computes("add", "sub", "mul", "min", "max", "div")
def binary(e: BlockEmitter, ins: Instruction) -> None:
    stem = ins.parts[0]
    if ins.parts[-1] in ("u16x2", "s16x2"):
        _packed_integer(e, ins)
        return
    if is_mixed(ins):
        mixed_precision(e, ins)
        return
    kind_name = type_of(ins)
    if is_packed_half(kind_name):
        packed_half(e, ins)
        return
    if kind_name.startswith("f"):
        float_binary(e, ins)
        return
    kind = KIND_OF_TYPE[kind_name]
    if stem == "mul" and "wide" in ins.parts:
        e.define(ins.operands[0], _wide_product(e, ins, kind), _wide(kind))
        return
    if stem == "mul" and "hi" in ins.parts:
        a, b = (e.value(x, kind) for x in ins.operands[1:3])
        e.define(ins.operands[0], f"multiply_high({a}, {b})", kind)
        return
    if "cc" in ins.parts:
        _carry_out(e, ins, kind)
        return
    if stem in ("add", "sub", "mul"):
        kind = UNSIGNED[BITS_OF_KIND[kind]] if "sat" not in ins.parts else kind
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    if "sat" in ins.parts:
        wide = f"({a}.astype(i64) {_SYMBOLS[stem]} {b})"
        e.define(ins.operands[0], f"np.clip({wide}, -(1 << 31), (1 << 31) - 1).astype(i32)", kind)
    elif stem == "div":
        e.define(ins.operands[0], f"divide({a}, {b})", kind)
    elif stem in ("min", "max"):
        out = f"np.{stem}imum({a}, {b})"
        if "relu" in ins.parts:
            out = f"np.maximum({out}, {DTYPES[kind]}(0))"
        e.define(ins.operands[0], out, kind)
    else:
        e.define(ins.operands[0], f"{a} {_SYMBOLS[stem]} {b}", kind)


def _packed_integer(e: BlockEmitter, ins: Instruction) -> None:
    """add, min and max of two 16-bit integers per register."""
    dtype = "i16" if ins.parts[-1] == "s16x2" else "u16"
    a, b = (f"words({e.value(x, 'u32')}, {dtype})" for x in ins.operands[1:3])
    name = {"add": "np.add", "min": "np.minimum", "max": "np.maximum"}[ins.parts[0]]
    out = f"{name}({a}, {b})"
    if "relu" in ins.parts:
        out = f"np.maximum({out}, i16(0))"
    e.define(ins.operands[0], f"{out}.view(u32)[:, 0]", "u32")


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * BITS_OF_KIND[kind]}"


def _wide_product(e: BlockEmitter, ins: Instruction, kind: str) -> str:
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    return f"{a}.astype({DTYPES[_wide(kind)]}) * {b}"


def _carry_out(e: BlockEmitter, ins: Instruction, kind: str) -> None:
    """add.cc / sub.cc / addc / subc: the condition-code bit is a block-local variable."""
    if BITS_OF_KIND[kind] == 64:
        _wide_carry(e, ins)
        return
    a, b = (f"{e.value(x, 'u32')}.astype(i64)" for x in ins.operands[1:3])
    sign = "-" if ins.parts[0].startswith("sub") else "+"
    carry = f" {sign} w.carry" if ins.parts[0].endswith("c") else ""
    wide = e.temporary()
    e.line(f"{wide} = {a} {sign} {b}{carry}")
    if "cc" in ins.parts:
        e.carry(f"({wide} >> 32) & 1")
    e.define(ins.operands[0], f"{wide}.astype(u32)", "u32")


def _wide_carry(e: BlockEmitter, ins: Instruction) -> None:
    a, b = (e.value(x, "u64") for x in ins.operands[1:3])
    carry = "w.carry" if ins.parts[0].endswith("c") else "np.zeros(32, i64)"
    out, over = e.temporary(), e.temporary()
    e.line(f"{out}, {over} = add_wide({a}, {b}, {carry}, {ins.parts[0].startswith('sub')})")
    if "cc" in ins.parts:
        e.carry(f"{over}")
    e.define(ins.operands[0], out, "u64")


@computes("addc", "subc")
def carry_in(e: BlockEmitter, ins: Instruction) -> None:
    _carry_out(e, ins, KIND_OF_TYPE[type_of(ins)])


@computes("rem")
def remainder(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    e.define(ins.operands[0], f"remainder({a}, {b})", kind)


@computes("mad", "madc")
def multiply_add(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    if ins.parts[0] == "madc" or "cc" in ins.parts:
        _multiply_carry(e, ins, kind)
        return
    if kind == "f32":
        a, b, c = (e.value(x, kind) for x in ins.operands[1:4])
        e.define(ins.operands[0], f"fma({a}, {b}, {c})", kind)
    elif "wide" in ins.parts:
        c = e.value(ins.operands[3], _wide(kind))
        e.define(ins.operands[0], f"{_wide_product(e, ins, kind)} + {c}", _wide(kind))
    elif "hi" in ins.parts:
        a, b, c = (e.value(x, kind) for x in ins.operands[1:4])
        e.define(ins.operands[0], f"multiply_high({a}, {b}) + {c}", kind)
    else:
        a, b, c = (e.value(x, UNSIGNED[BITS_OF_KIND[kind]]) for x in ins.operands[1:4])
        e.define(ins.operands[0], f"{a} * {b} + {c}", UNSIGNED[BITS_OF_KIND[kind]])


def _multiply_carry(e: BlockEmitter, ins: Instruction, kind: str) -> None:
    """mad.cc and madc: half of the product plus an addend and the carry."""
    if BITS_OF_KIND[kind] != 32:
        raise ValueError("64-bit multiply with carry")
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    product = f"multiply_high({a}, {b})" if "hi" in ins.parts else f"({a} * {b})"
    carry = " + w.carry" if ins.parts[0] == "madc" else ""
    wide = e.temporary()
    c = e.value(ins.operands[3], "u32")
    e.line(f"{wide} = {product}.view(u32).astype(i64) + {c}{carry}")
    if "cc" in ins.parts:
        e.carry(f"{wide} >> 32")
    e.define(ins.operands[0], f"{wide}.astype(u32)", "u32")


@computes("sad")
def absolute_difference(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    a, b, c = (e.value(x, kind) for x in ins.operands[1:4])
    e.define(ins.operands[0], f"np.maximum({a}, {b}) - np.minimum({a}, {b}) + {c}", kind)


@computes("slct")
def select_by_sign(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[next(p for p in ins.parts[1:] if p in TYPE_BITS)]
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    c = e.value(ins.operands[3], KIND_OF_TYPE[ins.parts[-1]])
    e.define(ins.operands[0], f"where({c} >= 0, {a}, {b})", kind)


@computes("and", "or", "xor")
def logic(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    e.define(ins.operands[0], f"{a} {_SYMBOLS[ins.parts[0]]} {b}", kind)


@computes("not")
def invert(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    e.define(ins.operands[0], f"~{e.value(ins.operands[1], kind)}", kind)


@computes("cnot")
def logical_not(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    e.define(ins.operands[0], f"({e.value(ins.operands[1], kind)} == 0).astype({kind})", kind)


@computes("lop3")
def lookup(e: BlockEmitter, ins: Instruction) -> None:
    a, b, c = (e.value(x, "u32") for x in ins.operands[1:4])
    out = f"lookup3({a}, {b}, {c}, {int(ins.operands[4], 0)})"
    if ins.parts[1] == "b32":
        e.define(ins.operands[0], out, "u32")
        return
    # lop3.or and .and also give a predicate: the result is not zero, or / and another one.
    target, predicate = ins.operands[0].split("|")
    result = e.temporary()
    other = e.value(ins.operands[5], "p")
    e.line(f"{result} = {out}")
    e.define(predicate, f"(({result} != 0) {_SYMBOLS[ins.parts[1]]} {other})", "p")
    e.define(target, result, "u32")


@computes("shl")
def shift_left(e: BlockEmitter, ins: Instruction) -> None:
    kind = UNSIGNED[TYPE_BITS[type_of(ins)]]
    bits = BITS_OF_KIND[kind]
    a = e.value(ins.operands[1], kind)
    count = ins.operands[2]
    if count.isdigit() and int(count) < bits:
        e.define(ins.operands[0], f"{a} << {e.constant(int(count), kind)}", kind)
    else:
        e.define(ins.operands[0], f"shift_left({a}, {e.value(count, 'u32')}, {bits})", kind)


@computes("shr")
def shift_right(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    bits = BITS_OF_KIND[kind]
    a = e.value(ins.operands[1], kind)
    count = ins.operands[2]
    if count.isdigit() and int(count) < bits:
        e.define(ins.operands[0], f"{a} >> {e.constant(int(count), kind)}", kind)
    else:
        name = "shift_right_signed" if kind.startswith("s") else "shift_right"
        e.define(ins.operands[0], f"{name}({a}, {e.value(count, 'u32')}, {bits})", kind)


@computes("shf")
def funnel_shift(e: BlockEmitter, ins: Instruction) -> None:
    low, high, count = (e.value(x, "u32") for x in ins.operands[1:4])
    left, clamp = ins.parts[1] == "l", ins.parts[2] == "clamp"
    e.define(ins.operands[0], f"funnel_shift({low}, {high}, {count}, {left}, {clamp})", "u32")


@computes("bfe")
def bit_field_extract(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    a = e.value(ins.operands[1], kind)
    p, n = (e.value(x, "u32") for x in ins.operands[2:4])
    e.define(ins.operands[0], f"extract_bits({a}, {p}, {n})", kind)


@computes("bfi")
def bit_field_insert(e: BlockEmitter, ins: Instruction) -> None:
    kind = UNSIGNED[TYPE_BITS[type_of(ins)]]
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    p, n = (e.value(x, "u32") for x in ins.operands[3:5])
    e.define(ins.operands[0], f"insert_bits({a}, {b}, {p}, {n})", kind)


@computes("brev", "popc", "clz", "bfind")
def bit_scan(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    bits = BITS_OF_KIND[kind]
    stem = ins.parts[0]
    a = e.value(ins.operands[1], kind)
    if stem == "brev":
        e.define(ins.operands[0], f"reverse_bits({a})", kind)
    elif stem == "popc":
        e.define(ins.operands[0], f"np.bitwise_count({a}).astype(u32)", "u32")
    elif stem == "clz":
        e.define(ins.operands[0], f"u32({bits - 1}) - find_highest({a})", "u32")
    else:
        if kind.startswith("s"):
            a = f"where({a} < 0, ~{a}, {a}).view({DTYPES[UNSIGNED[bits]]})"
        out = f"find_highest({a})"
        if "shiftamt" in ins.parts:
            out = f"where({out} == u32(0xffffffff), {out}, u32({bits - 1}) - {out})"
        e.define(ins.operands[0], out, "u32")


@computes("fns")
def find_nth_set(e: BlockEmitter, ins: Instruction) -> None:
    mask, base = (e.value(x, "u32") for x in ins.operands[1:3])
    offset = e.value(ins.operands[3], "s32")
    e.define(ins.operands[0], f"find_nth_set({mask}, {base}, {offset})", "u32")


@computes("bmsk")
def bit_mask(e: BlockEmitter, ins: Instruction) -> None:
    a, b = (e.value(x, "u32") for x in ins.operands[1:3])
    e.define(ins.operands[0], f"bit_mask({a}, {b}, {'clamp' in ins.parts})", "u32")


@computes("szext")
def extend(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    a, b = e.value(ins.operands[1], kind), e.value(ins.operands[2], "u32")
    e.define(ins.operands[0], f"extend_bits({a}, {b}, {'clamp' in ins.parts})", kind)


@computes("mul24", "mad24")
def multiply_24(e: BlockEmitter, ins: Instruction) -> None:
    """Low or high 32 of the 48 bits of a product of 24-bit integers, plus an addend."""
    kind = KIND_OF_TYPE[type_of(ins)]
    if "sat" in ins.parts:
        raise ValueError("mad24.hi.sat")
    a, b = (f"extend_bits({e.value(x, kind)}, u32(24), True)" for x in ins.operands[1:3])
    out = f"(({a}.astype(i64) * {b}) >> {16 if 'hi' in ins.parts else 0}).astype(u32)"
    if ins.parts[0] == "mad24":
        out = f"{out} + {e.value(ins.operands[3], 'u32')}"
    e.define(ins.operands[0], out, "u32")


@computes("prmt")
def permute(e: BlockEmitter, ins: Instruction) -> None:
    a, b, s = (e.value(x, "u32") for x in ins.operands[1:4])
    if len(ins.parts) > 2:
        e.define(ins.operands[0], f"select_bytes({a}, {b}, {s}, {ins.parts[2]!r})", "u32")
        return
    e.define(ins.operands[0], f"permute_bytes({a}, {b}, {s})", "u32")


@computes("dp4a")
def dot4(e: BlockEmitter, ins: Instruction) -> None:
    types = [p for p in ins.parts if p in ("u32", "s32")]
    a = f"words({e.value(ins.operands[1], 'u32')}, {'i8' if types[0] == 's32' else 'u8'})"
    b = f"words({e.value(ins.operands[2], 'u32')}, {'i8' if types[1] == 's32' else 'u8'})"
    c = e.value(ins.operands[3], "s32")
    e.define(ins.operands[0], f"({a}.astype(i32) * {b}).sum(1, dtype=i32) + {c}", "s32")


@computes("dp2a")
def dot2(e: BlockEmitter, ins: Instruction) -> None:
    """Two 16-bit values times the low or high two bytes of the second operand."""
    types = [p for p in ins.parts if p in ("u32", "s32")]
    a = f"words({e.value(ins.operands[1], 'u32')}, {'i16' if types[0] == 's32' else 'u16'})"
    b = f"words({e.value(ins.operands[2], 'u32')}, {'i8' if types[1] == 's32' else 'u8'})"
    half = ":2" if "lo" in ins.parts else "2:"
    c = e.value(ins.operands[3], "s32")
    out = f"({a}.astype(i32) * {b}[:, {half}]).sum(1, dtype=i32) + {c}"
    e.define(ins.operands[0], out, "s32")


@computes("neg", "abs")
def negate(e: BlockEmitter, ins: Instruction) -> None:
    name = type_of(ins)
    kind = KIND_OF_TYPE[name]
    a = e.value(ins.operands[1], kind)
    if name == "f32" and "ftz" in ins.parts:
        sign = "-" if ins.parts[0] == "neg" else "np.abs"
        e.define(ins.operands[0], f"{sign}(flush({a}))", kind)
    elif name in ("bf16", "bf16x2", "f16", "f16x2", "f32"):
        unsigned = UNSIGNED[BITS_OF_KIND[kind]]
        sign = {"bf16": 0x8000, "f16": 0x8000, "f32": 0x80000000}.get(name, 0x80008000)
        a = e.value(ins.operands[1], unsigned)
        if ins.parts[0] == "neg":
            e.define(ins.operands[0], f"{a} ^ {e.constant(sign, unsigned)}", unsigned)
        else:
            e.define(ins.operands[0], f"{a} & {e.constant(~sign, unsigned)}", unsigned)
    else:
        e.define(ins.operands[0], f"-{a}" if ins.parts[0] == "neg" else f"np.abs({a})", kind)
