"""Emitters for floating-point arithmetic: f32, f32x2, f64, f16, bf16 and their packed forms."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BlockEmitter, computes, type_of
from dsv4.simulator.compile.registers import KIND_OF_TYPE
from dsv4.simulator.ptx.entry import Instruction

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_ROUNDED = {
    "add": "add_rounded", "sub": "add_rounded", "mul": "multiply_rounded", "div": "divide_rounded",
}  # fmt: skip


def is_packed_half(name: str) -> bool:
    """True for the types whose arithmetic goes through float32."""
    return name in ("f16", "f16x2", "bf16", "bf16x2")


def is_mixed(ins: Instruction) -> bool:
    """True for f32 arithmetic whose factors, or first summand, are f16 or bf16."""
    return ins.parts[-2] == "f32" and ins.parts[-1] in ("f16", "bf16")


def mixed_precision(e: BlockEmitter, ins: Instruction) -> None:
    """add, sub and fma of f32 with operands of f16 or bf16 before the last: widened exactly."""
    decode = f"f32_of_{ins.parts[-1]}"
    *narrow, last = ins.operands[1:]
    values = [f"{decode}({e.value(x, 'u16')})" for x in narrow] + [e.value(last, "f32")]
    rounding = _directed(ins) or "rn"
    if ins.parts[0] == "fma":
        out = f"fma_rounded({', '.join(values)}, {rounding!r})"
    else:
        sign = "-" if ins.parts[0] == "sub" else ""
        out = f"add_rounded({values[0]}, {sign}{values[1]}, {rounding!r})"
    e.define(ins.operands[0], _modified(e, ins, out), "f32")


def _modified(e: BlockEmitter, ins: Instruction, expression: str) -> str:
    if "sat" in ins.parts:
        expression = f"saturate({expression})"
    if "ftz" in ins.parts:
        expression = f"flush({expression})"
    return expression


def _operands(e: BlockEmitter, ins: Instruction, kind: str) -> list[str]:
    values = [e.value(x, kind) for x in ins.operands[1:]]
    return [f"flush({v})" for v in values] if "ftz" in ins.parts else values


def _template(ins: Instruction) -> str:
    """An operand of an elementwise operation."""
    return "flush({})" if "ftz" in ins.parts else "{}"


def _directed(ins: Instruction) -> str | None:
    """The rounding mode if it is not to nearest."""
    return next((p for p in ins.parts if p in ("rz", "rm", "rp")), None)


def float_binary(e: BlockEmitter, ins: Instruction) -> None:
    """add, sub, mul, div, min, max of f32, f64 and f32x2."""
    kind = KIND_OF_TYPE[type_of(ins)]
    stem = ins.parts[0]
    if stem in ("min", "max"):
        _extremum(e, ins, kind)
        return
    rounding = _directed(ins)
    if rounding:
        a, b = _operands(e, ins, kind)
        if kind not in ("f32", "f32x2"):
            raise ValueError("rounding mode")
        second = f"-{b}" if stem == "sub" else b
        name = _ROUNDED[stem]
        out = f"{name}({a}, {second}, {rounding!r})"
        e.define(ins.operands[0], _modified(e, ins, out), kind)
        return
    value = _template(ins)
    out = _modified(e, ins, f"{value} {_SYMBOLS[stem]} {value}")
    e.elementwise(ins.operands[0], out, ins.operands[1:], (kind, kind))


def _ordered(ins: Instruction, name: str, a: str, b: str) -> str:
    """min or max with -0 below +0, by the numpy function that treats NaN as wanted."""
    return f"{'least' if ins.parts[0] == 'min' else 'greatest'}(np.{name}, {a}, {b})"


def _extremum(e: BlockEmitter, ins: Instruction, kind: str) -> None:
    name = (
        ("maximum" if ins.parts[0] == "max" else "minimum")
        if "NaN" in ins.parts
        else ("fmax" if ins.parts[0] == "max" else "fmin")
    )
    values = [_template(ins)] * len(ins.operands[1:])
    if "xorsign" in ins.parts:
        out = f"xorsign_abs(np.{name}, {values[0]}, {values[1]})"
    else:
        if "abs" in ins.parts:
            values = [f"np.abs({v})" for v in values]
        out = values[0]
        for value in values[1:]:
            out = f"np.{name}({out}, {value})" if kind == "f64" else _ordered(ins, name, out, value)
    e.elementwise(ins.operands[0], _modified(e, ins, out), ins.operands[1:], (kind, kind))


@computes("fma")
def fused(e: BlockEmitter, ins: Instruction) -> None:
    name = type_of(ins)
    if is_mixed(ins):
        mixed_precision(e, ins)
        return
    if is_packed_half(name):
        packed_half(e, ins)
        return
    kind = KIND_OF_TYPE[name]
    x = _template(ins)
    rounding = _directed(ins)
    if rounding and kind not in ("f32", "f32x2"):
        raise ValueError("rounding mode")
    if rounding:
        out = f"fma_rounded({x}, {x}, {x}, {rounding!r})"
    else:
        out = f"{x} * {x} + {x}" if kind == "f64" else f"fma({x}, {x}, {x})"
    e.elementwise(ins.operands[0], _modified(e, ins, out), ins.operands[1:], (kind, kind))


def packed_half(e: BlockEmitter, ins: Instruction) -> None:
    """f16 and bf16 arithmetic, one or two values per register: in float32, rounded once."""
    name = type_of(ins)
    scalar = name.removesuffix("x2")
    stem = ins.parts[0]
    kind = KIND_OF_TYPE[name] if name.endswith("x2") else "u16"
    values = [
        f"f32_of_{scalar}(contiguous({e.value(x, kind)}).view(u16))" for x in ins.operands[1:]
    ]
    if "ftz" in ins.parts:
        values = [f"flush_half({v})" for v in values]
    if stem == "fma":
        # Rounded to odd in float32, so that the second rounding is that of the exact sum.
        out = f"fma_rounded({values[0]}, {values[1]}, {values[2]}, 'odd')"
    elif stem in ("min", "max"):
        out = _half_extremum(ins, *values)
    else:
        out = f"{values[0]} {_SYMBOLS[stem]} {values[1]}"
    if "relu" in ins.parts:
        out = f"np.maximum({out}, f32(0))"
    if "sat" in ins.parts:
        out = f"saturate({out})"
    out = f"{scalar}_of_f32({out})"
    if "ftz" in ins.parts:
        out = f"f16_of_f32(flush_half(f32_of_f16({out})))"
    view = ".view(u32)" if name.endswith("x2") else ""
    e.define(ins.operands[0], f"{out}{view}", kind)


def _half_extremum(ins: Instruction, a: str, b: str) -> str:
    stem = ins.parts[0]
    function = f"np.{stem}imum" if "NaN" in ins.parts else f"np.f{stem}"
    if "xorsign" in ins.parts:
        return f"xorsign_abs({function}, {a}, {b})"
    return _ordered(ins, function.removeprefix("np."), a, b)


_UNARY = {
    "ex2": "exp2({})", "lg2": "np.log2({})", "rcp": "(f32(1) / {})", "sqrt": "np.sqrt({})",
    "rsqrt": "(f32(1) / np.sqrt({}))", "sin": "np.sin({})", "cos": "np.cos({})",
    "tanh": "tanh({})",
}  # fmt: skip


_ROUNDED_UNARY = {"rcp": "reciprocal_rounded", "sqrt": "root_rounded"}


@computes(*_UNARY)
def unary(e: BlockEmitter, ins: Instruction) -> None:
    name = type_of(ins)
    if is_packed_half(name):
        scalar = name.removesuffix("x2")
        kind = "u32" if name.endswith("x2") else "u16"
        a = f"f32_of_{scalar}(contiguous({e.value(ins.operands[1], kind)}).view(u16))"
        view = ".view(u32)" if name.endswith("x2") else ""
        out = f"{scalar}_of_f32({_UNARY[ins.parts[0]].format(a)}){view}"
        e.define(ins.operands[0], out, kind)
        return
    kind = KIND_OF_TYPE[name]
    # ex2 of a subnormal and of zero is 1 alike.
    out = _UNARY[ins.parts[0]].format("{}" if ins.parts[0] == "ex2" else _template(ins))
    if _directed(ins):
        if kind != "f32":
            raise ValueError("rounding mode")
        out = f"{_ROUNDED_UNARY[ins.parts[0]]}({_template(ins)}, {_directed(ins)!r})"
    if kind == "f64":
        out = out.replace("f32(1)", "1.0")
    e.elementwise(ins.operands[0], _modified(e, ins, out), ins.operands[1:2], (kind, kind))


@computes("copysign")
def copy_sign(e: BlockEmitter, ins: Instruction) -> None:
    kind = KIND_OF_TYPE[type_of(ins)]
    a, b = (e.value(x, kind) for x in ins.operands[1:3])
    e.define(ins.operands[0], f"np.copysign({b}, {a})", kind)


@computes("testp")
def test_property(e: BlockEmitter, ins: Instruction) -> None:
    a = e.value(ins.operands[1], KIND_OF_TYPE[type_of(ins)])
    tests = {
        "finite": f"np.isfinite({a})",
        "infinite": f"np.isinf({a})",
        "notanumber": f"np.isnan({a})",
        "number": f"~np.isnan({a})",
        "normal": f"(np.isfinite({a}) & ((np.abs({a}) >= np.finfo({a}.dtype).tiny) | ({a} == 0)))",
        "subnormal": f"(({a} != 0) & (np.abs({a}) < np.finfo({a}.dtype).tiny))",
    }
    e.define(ins.operands[0], tests[ins.parts[1]], "p")
