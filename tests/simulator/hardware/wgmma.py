"""wgmma on shared memory filled with numbers in linear order: the descriptors alone decide which
element goes where, so products agree only if both sides read the canonical layouts alike.

Exact programs multiply small integers, whose sums every accumulator holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.simulator.hardware.case import Buffer, Case, Row, Tolerance, module, poisoned
from tests.simulator.hardware.inputs import random_bytes, random_words, small_integers, uniform
from tests.simulator.hardware.snippets import PROLOGUE, copy_in

THREADS = 128
_A_BYTES, _B_BYTES = 16384, 36864
_IMAGE = _A_BYTES + _B_BYTES
_SIZES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_SWIZZLE_MODES = {0: 0, 128: 1, 64: 2, 32: 3}
# Small integers from -4 to 4 in the 8-bit formats.
_E4M3 = np.array([0xC8, 0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44, 0x48], np.uint8)
_E5M2 = np.array([0xC4, 0xC2, 0xC0, 0xBC, 0x00, 0x3C, 0x40, 0x42, 0x44], np.uint8)


@dataclass(frozen=True)
class Layout:
    """One operand's descriptor: bytes of the leading and stride offsets, swizzle span, the distance
    to the second product's operand, and whether it is MN-major."""

    leading: int
    stride: int
    span: int = 0
    step: int = 32
    mn_major: bool = False
    start: int = 0

    def __str__(self) -> str:
        major = "mn" if self.mn_major else "k"
        text = f"{major}{self.span}/{self.leading}/{self.stride}"
        return text + (f"+{self.start}" if self.start else "")

    def bits(self) -> int:
        """The descriptor, for a tile at shared offset `start` of its operand's area."""
        return (
            self.start >> 4
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | _SWIZZLE_MODES[self.span] << 62
        )


def k_major(rows: int, span: int) -> Layout:
    """The canonical K-major layout of `rows` rows."""
    if span == 0:
        return Layout(leading=rows * 16, stride=128, step=rows * 32)
    return Layout(leading=16, stride=8 * span, span=span, step=32 if span > 32 else rows * span)


def mn_major(rows: int, span: int, size: int = 2) -> Layout:
    """The canonical MN-major layout of `rows` rows (M or N)."""
    if span == 0:
        runs = -(-rows * size // 16)
        return Layout(leading=runs * 128, stride=128, step=2 * runs * 128, mn_major=True)
    runs = -(-rows * size // span)
    group = 8 * span
    return Layout(leading=2 * group, stride=group, span=span, step=2 * runs * group, mn_major=True)


@dataclass(frozen=True)
class Form:
    """One instruction: types, N, signs of the operands, A from registers."""

    d: str
    a: str
    b: str
    n: int
    registers: bool = False
    signs: tuple[int, int] = (1, 1)
    saturate: bool = False

    @property
    def name(self) -> str:
        """A short name."""
        text = f"{self.d} {self.a} {self.b} n{self.n}{' rs' if self.registers else ' ss'}"
        return text + ("" if self.signs == (1, 1) else f" signs {self.signs}")


def _program(form: Form, a: Layout, b: Layout) -> str:
    count = form.n // 4 if form.d == "f16" else form.n // 2
    depth = 32 // _SIZES[form.a]
    accumulators = [f"%acc{k}" for k in range(count)]
    integer = form.d == "s32"
    suffix = ".satfinite" if form.saturate else ""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{form.n}k{depth}.{form.d}.{form.a}.{form.b}{suffix}"
    tail = "" if integer else f", {form.signs[0]}, {form.signs[1]}"
    if form.a in ("bf16", "f16"):
        tail += (
            f", {int(b.mn_major)}" if form.registers else f", {int(a.mn_major)}, {int(b.mn_major)}"
        )
    lines = [PROLOGUE, f".reg .b32 %acc<{count}>, %f<8>;\n.reg .b64 %da, %db, %base, %sa, %sb;"]
    lines.append("ld.param.u64 %out, [out];\nld.param.u64 %in, [in];")
    lines.append("ld.param.u64 %da, [a];\nld.param.u64 %db, [b];")
    lines.append("ld.param.u64 %sa, [step_a];\nld.param.u64 %sb, [step_b];")
    lines.append(copy_in("%in", "%smem", _IMAGE, THREADS))
    lines.append("fence.proxy.async.shared::cta;\nbar.sync 0;")
    lines.append("shr.u32 %r0, %smem, 4;\ncvt.u64.u32 %base, %r0;\nadd.u64 %da, %da, %base;")
    lines.append(f"add.u64 %db, %db, %base;\nadd.u64 %db, %db, {_A_BYTES >> 4};")
    if form.registers:
        lines.append("mad.wide.u32 %at, %thread, 32, %in;")
        for k in (0, 4):
            names = ", ".join(f"%f{k + j}" for j in range(4))
            lines.append(f"ld.global.v4.b32 {{{names}}}, [%at+{_IMAGE + 4 * k}];")
    # Leftovers that the first product must not add to.
    lines += [f"mov.b32 {r}, 0x7fc07fc0;" for r in accumulators]
    lines.append("setp.ne.u32 %p0, %thread, %thread;\nsetp.eq.u32 %p1, %thread, %thread;")
    lines.append("wgmma.fence.sync.aligned;")
    for k, predicate in enumerate(("%p0", "%p1")):
        fragment = "{" + ", ".join(f"%f{4 * k + j}" for j in range(4)) + "}"
        operand = fragment if form.registers else "%da"
        lines.append(f"{opcode} {{{', '.join(accumulators)}}}, {operand}, %db, {predicate}{tail};")
        lines.append("add.u64 %da, %da, %sa;\nadd.u64 %db, %db, %sb;")
    lines.append("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")
    lines.append("mad.wide.u32 %at, %thread, 4, %out;")
    lines += [f"st.global.b32 [%at+{512 * k}], {r};" for k, r in enumerate(accumulators)]
    return module(
        "\n".join(lines), "u64 out, u64 in, u64 a, u64 b, u64 step_a, u64 step_b", threads=THREADS
    )


def _integers(kind: str, seed: str, size: int) -> np.ndarray:
    """`size` bytes of small integers in an element type; tf32 with noise below its precision."""
    if kind in ("s8", "u8"):
        return random_bytes(seed, size)
    count = size // _SIZES[kind]
    values = small_integers(seed, count, 4)
    if kind in ("e4m3", "e5m2"):
        return {"e4m3": _E4M3, "e5m2": _E5M2}[kind][values + 4]
    if kind == "f16":
        return values.astype(np.float16).view(np.uint8)
    bits = values.astype(np.float32).view(np.uint32)
    if kind == "bf16":
        return (bits >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    noise = random_words(f"{seed} noise", count) & np.uint32(0x1FFF)
    return np.where(bits == 0, bits, bits | noise).astype(np.uint32).view(np.uint8)


def _numbers(kind: str, seed: str, size: int) -> np.ndarray:
    """`size` bytes of random numbers of about unit size."""
    count = size // _SIZES[kind]
    values = uniform(seed, count, -2, 2)
    if kind in ("e4m3", "e5m2"):
        # Sign, exponent near the bias, random mantissa.
        base, shift = (0x28, 0x1F) if kind == "e4m3" else (0x34, 0x0F)
        codes = random_bytes(seed, count)
        return ((codes & 0x80) | (base + (codes & shift) % (shift + 1) // 2)).astype(np.uint8)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint8)
    if kind == "bf16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)


def multiply(form: Form, a: Layout, b: Layout, contents=_integers, tolerance=None) -> Case:
    """Two chained products, the first overwriting the accumulators."""
    name = form.name if form.registers else f"{form.name} A {a}"
    name = f"{name} B {b}"
    if contents is _numbers:
        name += " random"
    count = form.n // 4 if form.d == "f16" else form.n // 2
    size = 4 * THREADS * count
    data = [contents(form.a, f"A {form.a}", _A_BYTES), contents(form.b, f"B {form.b}", _B_BYTES)]
    if form.registers:
        data.append(contents(form.a, f"fragments {form.a}", 32 * THREADS))
    steps = [a.step >> 4, b.step >> 4]
    floats = {"f32": "f32", "f16": "f16"}.get(form.d)
    return Case(
        f"wgmma {name}",
        _program(form, a, b),
        (Row("accumulators", size, floats, tolerance),),
        (poisoned(size), np.concatenate(data)),
        (Buffer(0), Buffer(1), a.bits(), b.bits(), *steps),
        block=THREADS,
        shared=_IMAGE,
    )


def _layout_cases() -> list[Case]:
    out = []
    for span in (0, 32, 64, 128):
        for n in (8, 64, 96):
            form = Form("f32", "bf16", "bf16", n)
            out.append(multiply(form, k_major(64, span), k_major(n, span)))
            out.append(multiply(form, mn_major(64, span), k_major(n, span)))
            out.append(multiply(form, k_major(64, span), mn_major(n, span)))
        form = Form("f32", "f16", "f16", 128)
        out.append(multiply(form, mn_major(64, span), mn_major(128, span)))
        # Core matrices of A and B in different orders, spread out.
        form = Form("f32", "bf16", "bf16", 32)
        loose = Layout(128, 512) if span == 0 else Layout(16, 16 * span, span)
        out.append(multiply(form, loose, k_major(32, span)))
        out.append(multiply(form, k_major(64, span), loose))
        other = {0: 64, 32: 128, 64: 32, 128: 0}[span]
        out.append(multiply(form, k_major(64, other), k_major(32, span)))
    form = Form("f32", "bf16", "bf16", 16)
    # Tiles that start inside the swizzle's pattern, as a loop over K makes them.
    for start in (32, 64):
        layout = Layout(16, 1024, 128, 32, start=start)
        out.append(multiply(form, layout, layout))
    for n in (24, 40, 128, 192, 256):
        out.append(multiply(Form("f32", "bf16", "bf16", n), k_major(64, 128), k_major(n, 128)))
    out.append(multiply(Form("f32", "bf16", "bf16", 256), k_major(64, 128), mn_major(256, 128)))
    return out


def _type_cases() -> list[Case]:
    out = []
    kinds = [("f16", "f16", "f16"), ("f32", "f16", "f16"), ("f32", "tf32", "tf32")]
    kinds += [(d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    kinds += [("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")]
    for d, a, b in kinds:
        for span, n in ((128, 32), (32, 8), (0, 16)):
            out.append(multiply(Form(d, a, b, n), k_major(64, span), k_major(n, span)))
        out.append(multiply(Form(d, a, b, 16, True), k_major(64, 128), k_major(16, 128)))
    out.append(multiply(Form("f32", "bf16", "bf16", 64, True), k_major(64, 128), mn_major(64, 128)))
    saturating = Form("s32", "s8", "s8", 24, saturate=True)
    out.append(multiply(saturating, k_major(64, 64), k_major(24, 64)))
    for signs in ((-1, 1), (1, -1), (-1, -1)):
        for a in ("bf16", "e4m3"):
            form = Form("f32", a, a, 16, signs=signs)
            out.append(multiply(form, k_major(64, 128), k_major(16, 128)))
    return out


def _random_cases() -> list[Case]:
    """Sums that round: hardware adds the products of one instruction in fewer bits than float32;
    of FP8 it is known in which."""
    tolerances = {
        "bf16": Tolerance(absolute=2.0**-17),
        "f16": Tolerance(absolute=2.0**-17),
        "tf32": Tolerance(absolute=2.0**-17),
        "e4m3": None,
    }
    out = []
    for kind, tolerance in tolerances.items():
        form = Form("f32", kind, kind, 8)
        out.append(multiply(form, k_major(64, 128), k_major(8, 128), _numbers, tolerance))
    return out


def _register_budgets() -> Case:
    """setmaxnreg: two warpgroups trade registers, results stay."""
    lines = [PROLOGUE, "ld.param.u64 %out, [out];\nld.param.u64 %in, [in];"]
    lines.append(
        "mad.wide.u32 %at, %thread, 4, %in;\nld.global.b32 %r0, [%at];\n"
        "mad.wide.u32 %at, %thread, 4, %out;\nsetp.lt.u32 %p0, %thread, 128;\n@%p0 bra FEW;\n"
        "setmaxnreg.inc.sync.aligned.u32 200;\nshl.b32 %r0, %r0, 1;\nbra JOIN;\n"
        "FEW:\nsetmaxnreg.dec.sync.aligned.u32 40;\nadd.u32 %r0, %r0, 3;\nJOIN:\n"
        "st.global.b32 [%at], %r0;"
    )
    data = random_words("setmaxnreg", 256).view(np.uint8)
    return Case(
        "setmaxnreg",
        # The compiler heeds setmaxnreg only when it knows the register count at entry.
        module("\n".join(lines), "u64 out, u64 in", threads=256).replace(
            ".reqntid", ".minnctapersm 1\n.reqntid"
        ),
        (Row("words", 1024),),
        (poisoned(1024), data),
        (Buffer(0), Buffer(1)),
        block=256,
    )


def cases() -> list[Case]:
    """The wgmma programs."""
    return [*_layout_cases(), *_type_cases(), *_random_cases(), _register_budgets()]
