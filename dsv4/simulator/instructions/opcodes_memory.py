"""Emitters for loads, stores, atomics, matrix loads and non-bulk asynchronous copies."""

from __future__ import annotations

import re

from dsv4.simulator.compile.codegen import BlockEmitter, emits, type_of
from dsv4.simulator.compile.registers import BITS_OF_KIND, DTYPES, KIND_OF_TYPE, UNSIGNED
from dsv4.simulator.ptx.entry import Instruction

_SPACES = ("param", "shared", "global", "local", "const")
_STRONG = ("acquire", "relaxed", "volatile", "mmio")


def _space(ins: Instruction) -> str:
    for part in ins.parts[1:]:
        stem = part.split("::")[0]
        if stem in _SPACES:
            return "global" if stem == "const" else stem
    return "generic"


def _count(ins: Instruction) -> int:
    return next((int(p[1:]) for p in ins.parts if re.fullmatch(r"v\d", p)), 1)


@emits("ld", "ldu")
def load(e: BlockEmitter, ins: Instruction) -> None:
    space, count = _space(ins), _count(ins)
    kind = KIND_OF_TYPE[type_of(ins)]
    targets = e.vector(ins.operands[0])
    out = e.temporary()
    if kind == "u128":
        _load_128(e, ins, space)
        return
    bits = BITS_OF_KIND[kind]
    e.mark()
    if space == "param":
        e.line(f"{out} = {_load_param(e, ins, count, bits)}")
    else:
        address = e.address(ins.operands[1], "u32" if space == "shared" else "u64")
        e.line(f"{out} = load_{space}(w, {address}, {count}, {bits}, {e.mask})")
    if space in ("global", "generic", "shared") and any(p in ins.parts for p in _STRONG):
        # A flag that another warp may set: give the others a turn before the next block.
        e.line("w.polling = True")
    for i, target in enumerate(targets):
        if target != "_":
            view = f".view({DTYPES[kind]})" if kind[0] in "sf" else ""
            e.define(target, f"{out}[{i}]{view}", kind)


def _load_128(e: BlockEmitter, ins: Instruction, space: str) -> None:
    address = e.address(ins.operands[1], "u32" if space == "shared" else "u64")
    e.mark()
    out = e.temporary()
    load = "load_param_at" if space == "param" else f"load_{space}"
    e.line(f"{out} = {load}(w, {address}, 2, 64, {e.mask})")
    e.define(ins.operands[0], f"np.stack({out}, 1)", "u128")


def _load_param(e: BlockEmitter, ins: Instruction, count: int, bits: int) -> str:
    inner = ins.operands[1][1:-1].strip()
    m = re.match(r"^([^\s+]+)\s*(?:\+\s*(-?\d+))?$", inner)
    name, extra = m.group(1), int(m.group(2) or 0)
    if name in e.entry.params:
        return f"load_param(w, {e.entry.params[name][0] + extra}, {count}, {bits})"
    address = e.address(ins.operands[1], "u64")
    return f"load_param_at(w, {address}, {count}, {bits}, {e.mask})"


@emits("st")
def store(e: BlockEmitter, ins: Instruction) -> None:
    if "async" in ins.parts:
        _store_async(e, ins)
        return
    space = _space(ins)
    e.mark()
    if "bulk" in ins.parts:
        address, size = e.address(ins.operands[0], "u32"), e.value(ins.operands[1], "u64")
        if space != "shared" or int(ins.operands[2], 0):
            raise ValueError("st.bulk of anything but zeros to shared memory")
        e.line(f"clear_shared(w, {address}, {size}, {e.mask})")
        return
    kind = UNSIGNED[BITS_OF_KIND[KIND_OF_TYPE[type_of(ins)]]]
    bits = BITS_OF_KIND[kind]
    values = ", ".join(e.value(v, kind) for v in e.vector(ins.operands[1]))
    if kind == "u128":
        values, bits = f"*contiguous({values}.T)", 64
    address = e.address(ins.operands[0], "u32" if space == "shared" else "u64")
    e.line(f"store_{space}(w, {address}, ({values},), {bits}, {e.mask})")


def _store_async(e: BlockEmitter, ins: Instruction) -> None:
    """st.async and red.async: remote writes that complete bytes on an mbarrier."""
    kind = KIND_OF_TYPE[type_of(ins)]
    op = next((p for p in ins.parts if p in _ATOMIC), None)
    unsigned = UNSIGNED[BITS_OF_KIND[kind]]
    values = ", ".join(e.value(v, unsigned) for v in e.vector(ins.operands[1]))
    address, barrier = e.address(ins.operands[0], "u32"), e.address(ins.operands[2], "u32")
    e.mark()
    e.line(
        f"store_async(w, {op!r}, {DTYPES[kind]}, {address}, ({values},), {BITS_OF_KIND[kind]}, "
        f"{barrier}, {e.mask})"
    )


_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@emits("atom", "red")
def atomic(e: BlockEmitter, ins: Instruction) -> None:
    if "async" in ins.parts and len(ins.operands) > 2:
        _store_async(e, ins)
        return
    returns = ins.parts[0] == "atom"
    target = ins.operands[0] if returns else "_"
    operands = ins.operands[1:] if returns else ins.operands
    op = next(p for p in ins.parts if p in _ATOMIC)
    name = type_of(ins)
    kind = KIND_OF_TYPE[name]
    space = _space(ins)
    if name in ("f16x2", "bf16x2", "bf16", "f16") or _count(ins) > 1:
        _atomic_vector(e, ins, target, operands, op, name)
        return
    address = e.address(operands[0], "u32" if space == "shared" else "u64")
    values = ", ".join(e.value(x, kind) for x in operands[1:])
    e.mark()
    if kind == "u128":
        if space == "shared":
            raise ValueError("16-byte atomics of shared memory")
        e.define(target, f"atomic_wide(w, {op!r}, {address}, ({values},), {e.mask})", kind)
        return
    out = f"atomic(w, {space!r}, {op!r}, {DTYPES[kind]}, {address}, ({values},), {e.mask})"
    e.define(target, out, kind)


def _atomic_vector(e, ins, target: str, operands: list[str], op: str, name: str) -> None:
    """Vector or half-precision add: element by element, lanes ascending."""
    space = _space(ins)
    address = e.address(operands[0], "u32" if space == "shared" else "u64")
    kind = KIND_OF_TYPE[name]
    values = ", ".join(e.value(x, kind) for x in e.vector(operands[1]))
    out = e.temporary()
    e.mark()
    e.line(
        f"{out} = atomic_vector(w, {space!r}, {op!r}, {name!r}, {address}, ({values},), {e.mask})"
    )
    if target != "_":
        for i, register in enumerate(e.vector(target)):
            e.define(register, f"{out}[{i}].view({DTYPES[kind]})", kind)


def _padded_bits(ins: Instruction, default: int | None = None) -> int:
    """Bits of elements that are padded to 16 bytes a row."""
    for name, bits in (("b4x16_p64", 4), ("b6x16_p32", 6)):
        if name in ins.parts:
            return bits
    if default is None:
        raise ValueError("ldmatrix shape")
    return default


@emits("multimem")
def several_devices(e: BlockEmitter, ins: Instruction) -> None:
    raise ValueError("multimem addresses name several GPUs, one is simulated")


@emits("wmma")
def opaque_fragments(e: BlockEmitter, ins: Instruction) -> None:
    raise ValueError("wmma's fragments are opaque: mma.sync and ldmatrix are simulated")


@emits("ldmatrix")
def load_matrix(e: BlockEmitter, ins: Instruction) -> None:
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
def store_matrix(e: BlockEmitter, ins: Instruction) -> None:
    values = ", ".join(e.value(v, "u32") for v in e.vector(ins.operands[1]))
    address = e.address(ins.operands[0], "u32")
    e.mark()
    if "m16n8" in ins.parts and type_of(ins) == "b8" and "trans" in ins.parts:
        e.line(f"store_matrix_b8(w, {address}, ({values},), {e.mask})")
        return
    if "m8n8" not in ins.parts or type_of(ins) != "b16":
        raise ValueError("stmatrix shape")
    e.line(f"store_matrix(w, {address}, ({values},), {'trans' in ins.parts}, {e.mask})")


@emits("cp.async")
def copy_async(e: BlockEmitter, ins: Instruction) -> None:
    target, source = e.address(ins.operands[0], "u32"), e.address(ins.operands[1], "u64")
    size = int(ins.operands[2], 0)
    limit = e.value(ins.operands[3], "u32") if len(ins.operands) > 3 else "None"
    e.mark()
    e.line(f"copy_async(w, {target}, {source}, {size}, {limit}, {e.mask})")


@emits("cp.async.commit_group")
def copy_commit(e: BlockEmitter, ins: Instruction) -> None:
    e.line("copy_commit(w)")


@emits("cp.async.wait_group")
def copy_wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"copy_wait(w, {int(ins.operands[0], 0)})")


@emits("cp.async.wait_all")
def copy_wait_all(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line("copy_wait_all(w)")


@emits("cp.async.mbarrier")
def copy_arrive(e: BlockEmitter, ins: Instruction) -> None:
    address = e.address(ins.operands[0], "u32")
    e.mark()
    e.line(f"copy_arrive(w, {address}, {'noinc' in ins.parts}, {e.mask})")
