"""Emitters for cvt and address-space conversions."""

from __future__ import annotations

from dsv4.simulator.arithmetic.numerics import SMALL_FLOATS
from dsv4.simulator.compile.codegen import BlockEmitter, computes
from dsv4.simulator.compile.registers import BITS_OF_KIND, DTYPES, KIND_OF_TYPE, UNSIGNED
from dsv4.simulator.ptx.entry import Instruction

_SMALL_PAIRS = {f"{name}x2": name for name in SMALL_FLOATS}
_TYPES = {*KIND_OF_TYPE, *_SMALL_PAIRS, "ue8m0x2", "s2f6x2", "tf32"}
_ROUNDINGS = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}


@computes("cvt")
def convert(e: BlockEmitter, ins: Instruction) -> None:
    if ins.parts[1] == "pack":
        _pack_saturated(e, ins)
        return
    types = [p for p in ins.parts[1:] if p in _TYPES]
    target, source = types[0], types[1]
    if target in _SMALL_PAIRS or target == "ue8m0x2":
        _to_small(e, ins, target, source)
    elif target == "s2f6x2":
        raise ValueError("fixed point from floats")
    elif source == "s2f6x2":
        _from_fixed(e, ins)
    elif source in _SMALL_PAIRS or source == "ue8m0x2":
        _from_small(e, ins, target, source)
    elif target in ("bf16x2", "f16x2"):
        _to_half_pair(e, ins, target)
    elif target == "bf16" or source == "bf16":
        _bf16(e, ins, target, source)
    elif target == "tf32":
        rounding = next(p for p in ins.parts if p in ("rna", "rn", "rz"))
        value = e.value(ins.operands[1], "f32")
        flags = f"{'relu' in ins.parts}, {'satfinite' in ins.parts}"
        out = f"tf32_of_f32({value}, {rounding!r}, {flags})"
        e.define(ins.operands[0], out, "u32")
    else:
        _plain(e, ins, target, source)


def _plain(e: BlockEmitter, ins: Instruction, target: str, source: str) -> None:
    kind, source_kind = KIND_OF_TYPE[target], KIND_OF_TYPE[source]
    value = e.value(ins.operands[1], source_kind)
    rounding = next((p for p in ins.parts if p in _ROUNDINGS), None)
    directed = next((p for p in ins.parts if p in ("rz", "rm", "rp")), None)
    if "ftz" in ins.parts and source == "f32":
        value = f"flush({value})"
    if source[0] == "f" and target[0] != "f":
        out = f"to_integer({value}, {rounding!r}, {DTYPES[kind]})"
    elif source[0] == "f" and target[0] == "f":
        out = f"{_ROUNDINGS[rounding]}({value})" if rounding else value
        if "sat" in ins.parts:
            out = f"saturate({out})"
        if target == "f16" and source == "f32":
            out = f"{_half_of(ins, 'f16', out)}.view(f16)"
        elif directed and (source, target) == ("f64", "f32"):
            out = f"narrow({out}, {directed!r})"
        elif directed and target != source:
            raise ValueError("rounding mode")
        elif target != source:
            out = f"{out}.astype({DTYPES[kind]})"
    elif "sat" in ins.parts:
        info = f"np.iinfo({DTYPES[kind]})"
        out = f"np.clip({value}.astype(i64), {info}.min, {info}.max).astype({DTYPES[kind]})"
    elif directed and target == "f32":
        if BITS_OF_KIND[source_kind] == 64:
            raise ValueError("rounding mode")
        out = f"narrow({value}.astype(f64), {directed!r})"
    else:
        out = f"{value}.astype({DTYPES[kind]})"
    e.define(ins.operands[0], out, kind)


def _half_of(ins: Instruction, target: str, value: str) -> str:
    """float32 to f16 or bf16 bits with the instruction's rounding and limits."""
    if "relu" in ins.parts:
        value = f"np.maximum({value}, f32(0))"
    name = f"{target}_of_f32_truncated" if "rz" in ins.parts else f"{target}_of_f32"
    out = f"{name}({value})"
    if "satfinite" in ins.parts:
        out = f"finite({out}, {'0x7bff' if target == 'f16' else '0x7f7f'})"
    return out


def _bf16(e: BlockEmitter, ins: Instruction, target: str, source: str) -> None:
    if target == "bf16" and source == "f32":
        e.define(ins.operands[0], _half_of(ins, "bf16", e.value(ins.operands[1], "f32")), "u16")
    elif target == "f32" and source == "bf16":
        e.define(ins.operands[0], f"f32_of_bf16({e.value(ins.operands[1], 'u16')})", "f32")
    elif target == "bf16":
        value = e.value(ins.operands[1], KIND_OF_TYPE[source])
        e.define(ins.operands[0], f"bf16_of_f32(narrow({value}.astype(f64), 'odd'))", "u16")
    else:
        value = f"f32_of_bf16({e.value(ins.operands[1], 'u16')})"
        kind = KIND_OF_TYPE[target]
        if target == "f16":
            e.define(ins.operands[0], f"f16_of_f32({value})", "u16")
        elif target[0] == "f":
            e.define(ins.operands[0], f"{value}.astype({DTYPES[kind]})", kind)
        else:
            rounding = next(p for p in ins.parts if p in _ROUNDINGS)
            e.define(ins.operands[0], f"to_integer({value}, {rounding!r}, {DTYPES[kind]})", kind)


def _to_half_pair(e: BlockEmitter, ins: Instruction, target: str) -> None:
    if target == "bf16x2" and not {"rz", "relu", "satfinite"} & set(ins.parts):
        pair, kinds = ins.operands[1:3], ("f32", "u32")
        e.elementwise(ins.operands[0], "bf16x2_of_f32({}, {})", pair, kinds, broadcasts=False)
        return
    high, low = (e.value(x, "f32") for x in ins.operands[1:3])
    scalar = target.removesuffix("x2")
    out = f"pack32({_half_of(ins, scalar, low)}, {_half_of(ins, scalar, high)})"
    e.define(ins.operands[0], out, "u32")


def _to_small(e: BlockEmitter, ins: Instruction, target: str, source: str) -> None:
    """Two values to two small floats; the first operand goes to the high half."""
    if source == "f32":
        high, low = (e.value(x, "f32") for x in ins.operands[1:3])
    else:
        scalar = source.removesuffix("x2")
        pair = e.temporary()
        e.line(f"{pair} = f32_of_{scalar}(words({e.value(ins.operands[1], 'u32')}, u16))")
        high, low = f"{pair}[:, 1]", f"{pair}[:, 0]"
    if target == "ue8m0x2":
        flags = f"round_up={'rp' in ins.parts}, saturate={'satfinite' in ins.parts}"
        codes = [f"ue8m0_of_f32({v}, {flags})" for v in (low, high)]
    else:
        name, relu = _SMALL_PAIRS[target], "relu" in ins.parts
        codes = [f"SMALL_FLOATS[{name!r}].encode({v}, relu={relu})" for v in (low, high)]
    if target == "e2m1x2":
        e.define(ins.operands[0], f"{codes[0]} | ({codes[1]} << u8(4))", "u8")
    else:
        e.define(ins.operands[0], f"np.stack(({codes[0]}, {codes[1]}), 1).view(u16)[:, 0]", "u16")


def _from_small(e: BlockEmitter, ins: Instruction, target: str, source: str) -> None:
    """Two small floats to f16x2 or bf16x2."""
    if source == "e2m1x2":
        byte = e.value(ins.operands[1], "u8")
        codes = f"np.stack(({byte} & u8(15), {byte} >> u8(4)), 1)"
    else:
        codes = f"words({e.value(ins.operands[1], 'u16')}, u8)"
    if source == "ue8m0x2":
        values = f"f32_of_ue8m0({codes})"
    else:
        values = f"SMALL_FLOATS[{_SMALL_PAIRS[source]!r}].decode({codes})"
    name = "f16_of_f32" if target == "f16x2" else "bf16_of_f32"
    if "relu" in ins.parts:
        values = f"np.maximum({values}, f32(0))"
    e.define(ins.operands[0], f"{name}({values}).view(u32)[:, 0]", "u32")


def _from_fixed(e: BlockEmitter, ins: Instruction) -> None:
    """Two bytes with six bits behind the point to bf16x2, scaled by powers of two."""
    values = f"words({e.value(ins.operands[1], 'u16')}, i8) / f32(64)"
    if len(ins.operands) > 2:
        values += f" * f32_of_ue8m0(words({e.value(ins.operands[2], 'u16')}, u8))"
    e.define(ins.operands[0], f"{_half_of(ins, 'bf16', values)}.view(u32)[:, 0]", "u32")


def _pack_saturated(e: BlockEmitter, ins: Instruction) -> None:
    """cvt.pack.sat: two s32 to two narrow integers, over a shifted third operand."""
    narrow = next(p for p in ins.parts if p in ("u16", "s16", "u8", "s8"))
    high, low = (e.value(x, "s32") for x in ins.operands[1:3])
    dtype = DTYPES[KIND_OF_TYPE[narrow]]
    pair = f"np.clip(np.stack(({low}, {high}), 1), np.iinfo({dtype}).min, np.iinfo({dtype}).max)"
    if narrow.endswith("16"):
        e.define(ins.operands[0], f"{pair}.astype({dtype}).view(u32)[:, 0]", "u32")
    else:
        packed = f"{pair}.astype({dtype}).view(u16)[:, 0].astype(u32)"
        rest = f" | ({e.value(ins.operands[3], 'u32')} << u32(16))" if len(ins.operands) > 3 else ""
        e.define(ins.operands[0], f"{packed}{rest}", "u32")


@computes("cvta")
def convert_address(e: BlockEmitter, ins: Instruction) -> None:
    """Windows: shared and local addresses sit in their own ranges of the generic space."""
    to_space = ins.parts[1] == "to"
    space = ins.parts[2] if to_space else ins.parts[1]
    value = e.value(ins.operands[1], "u64")
    if space.startswith("shared") or space == "local":
        window = "SHARED_WINDOW" if space.startswith("shared") else "LOCAL_WINDOW"
        value = f"{value} - u64({window})" if to_space else f"{value} + u64({window})"
    elif space == "param" and not to_space:
        value = f"{value} | u64(PARAM_WINDOW)"  # its address may have been a number of 32 bits
    elif space not in ("global", "param", "const"):
        raise ValueError(f"address space {space}")
    e.define(ins.operands[0], value, UNSIGNED[BITS_OF_KIND["u64"]])


@computes("isspacep")
def is_space(e: BlockEmitter, ins: Instruction) -> None:
    address = e.value(ins.operands[1], "u64")
    e.define(ins.operands[0], f"in_space({address}, {ins.parts[1]!r})", "p")
