"""wgmma on FP8 operands whose products lie far apart: which bits of a sum the tensor core keeps.

The operands are random codes over the whole range of their formats, so that a sum's products differ
by up to 2^35 (e4m3) or 2^60 (e5m2), and its bits say where smaller ones were cut off: 12, 13 or 14
bits below the largest, or not at all. Chains of products show whether the sum between two
instructions is kept in float32.
"""

from __future__ import annotations

import numpy as np

from tests.simulator.hardware.case import Buffer, Case, Row, module, poisoned
from tests.simulator.hardware.inputs import random_bytes, random_words
from tests.simulator.hardware.snippets import PROLOGUE, copy_in
from tests.simulator.hardware.wgmma import k_major

THREADS = 128
_N, _DEPTH = 64, 32
_TILE = 64 * _DEPTH  # bytes of A, and of B, for one product
_STEP = _TILE >> 4
# Exponent bits of a code, and the codes that are NaN or infinite.
_EXPONENT_SHIFT = {"e4m3": 3, "e5m2": 2}
_SPECIAL_FROM = {"e4m3": 0x7F, "e5m2": 0x7C}


def _program(d: str, a: str, b: str, chain: int, registers: bool) -> str:
    """`chain` products, added to accumulators that are loaded first."""
    count = _N // 4 if d == "f16" else _N // 2
    accumulators = [f"%acc{k}" for k in range(count)]
    opcode = f"wgmma.mma_async.sync.aligned.m64n{_N}k{_DEPTH}.{d}.{a}.{b}"
    size = 2 * _TILE * chain
    lines = [
        PROLOGUE, f".reg .b32 %acc<{count}>, %f<{4 * chain}>;\n.reg .b64 %da, %db, %base, %sums;",
        "ld.param.u64 %out, [out];\nld.param.u64 %in, [in];\nld.param.u64 %sums, [sums];",
        "ld.param.u64 %da, [a];\nld.param.u64 %db, [b];",
        copy_in("%in", "%smem", size, THREADS),
        "fence.proxy.async.shared::cta;\nbar.sync 0;",
        "shr.u32 %r0, %smem, 4;\ncvt.u64.u32 %base, %r0;\nadd.u64 %da, %da, %base;",
        f"add.u64 %db, %db, %base;\nadd.u64 %db, %db, {_TILE * chain >> 4};",
        "mad.wide.u32 %at, %thread, 4, %sums;",
        *(f"ld.global.b32 {r}, [%at+{4 * THREADS * k}];" for k, r in enumerate(accumulators)),
    ]  # fmt: skip
    if registers:
        lines.append(f"mad.wide.u32 %at, %thread, {16 * chain}, %in;")
        for k in range(chain):
            names = ", ".join(f"%f{4 * k + j}" for j in range(4))
            lines.append(f"ld.global.v4.b32 {{{names}}}, [%at+{16 * k}];")
    lines.append("setp.eq.u32 %p0, %thread, %thread;\nwgmma.fence.sync.aligned;")
    for k in range(chain):
        fragment = "{" + ", ".join(f"%f{4 * k + j}" for j in range(4)) + "}"
        operand = fragment if registers else "%da"
        lines.append(f"{opcode} {{{', '.join(accumulators)}}}, {operand}, %db, %p0, 1, 1;")
        lines.append(f"add.u64 %da, %da, {_STEP};\nadd.u64 %db, %db, {_STEP};")
    lines.append("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")
    lines.append("mad.wide.u32 %at, %thread, 4, %out;")
    lines += [f"st.global.b32 [%at+{4 * THREADS * k}], {r};" for k, r in enumerate(accumulators)]
    return module("\n".join(lines), "u64 out, u64 in, u64 a, u64 b, u64 sums", threads=THREADS)


def _finite(kind: str, seed: str, size: int) -> np.ndarray:
    """Random codes of every exponent, subnormals and zeros among them."""
    codes = random_bytes(seed, size)
    return np.where(codes & 0x7F >= _SPECIAL_FROM[kind], codes & 0xBF, codes).astype(np.uint8)


def _near(kind: str, seed: str, size: int) -> np.ndarray:
    """Codes of four neighbouring exponents: nearly every product reaches the sum."""
    codes = random_bytes(seed, size)
    shift = _EXPONENT_SHIFT[kind]
    middle = 6 if kind == "e4m3" else 14
    exponents = middle + (random_bytes(f"{seed} exponents", size) & 3)
    return (codes & 0x80 | exponents << shift | codes & ((1 << shift) - 1)).astype(np.uint8)


def _any(kind: str, seed: str, size: int) -> np.ndarray:
    """Finite codes, and now and then an infinity (e5m2) or NaN."""
    special = random_words(f"{seed} special", size) % np.uint32(97) == 0
    codes = random_bytes(f"{seed} which", size) % (0x80 - _SPECIAL_FROM[kind])
    codes = codes + _SPECIAL_FROM[kind] | random_bytes(f"{seed} sign", size) & 0x80
    return np.where(special, codes, _finite(kind, seed, size)).astype(np.uint8)


_CONTENTS = {"wide": _finite, "near": _near, "special": _any}


def _sums(d: str, seed: str, spread: int) -> np.ndarray:
    """Initial accumulators, as bytes: zeros, or numbers of about 2^-spread to 2^spread."""
    count = THREADS * _N // 2
    if not spread:
        return np.zeros(count * (2 if d == "f16" else 4), np.uint8)
    words = random_words(seed, count)
    if d == "f16":
        return (words & np.uint32(0xBFFF)).astype(np.uint16).view(np.uint8)
    exponents = random_words(f"{seed} exponents", count) % np.uint32(2 * spread) + np.uint32(
        127 - spread
    )
    return (words & np.uint32(0x807FFFFF) | exponents << np.uint32(23)).view(np.uint8)


def fp8_sum(
    d: str, a: str, b: str, contents: str, *, chain: int = 1, spread: int = 0,
    registers: bool = False,
) -> Case:  # fmt: skip
    """Sums of `chain` products of 64 x 64 x 32, onto accumulators spread over 2^±spread."""
    start = f"sums 2^{spread}" if spread else "zero"
    form = "rs" if registers else "ss"
    name = f"fp8 {d} {a} {b} {form} {contents} x{chain} from {start}"
    make = _CONTENTS[contents]
    operands = [make(kind, f"{name} {side}", _TILE * chain) for side, kind in (("A", a), ("B", b))]
    size = 4 * THREADS * (_N // 4 if d == "f16" else _N // 2)
    layout = k_major(64, 32).bits()
    return Case(
        name,
        _program(d, a, b, chain, registers),
        (Row("accumulators", size, d),),
        (poisoned(size), np.concatenate(operands), _sums(d, f"{name} sums", spread)),
        (Buffer(0), Buffer(1), layout, layout, Buffer(2)),
        block=THREADS,
        shared=2 * _TILE * chain,
    )


def cases() -> list[Case]:
    """The FP8 programs."""
    out = []
    for d in ("f32", "f16"):
        for a, b in (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")):
            out.append(fp8_sum(d, a, b, "wide"))
            out.append(fp8_sum(d, a, b, "near", chain=2))
            out.append(fp8_sum(d, a, b, "special"))
        out.append(fp8_sum(d, "e4m3", "e4m3", "near"))
        out.append(fp8_sum(d, "e4m3", "e4m3", "near", spread=6))
        out.append(fp8_sum(d, "e4m3", "e4m3", "wide", spread=20))
        out.append(fp8_sum(d, "e4m3", "e4m3", "wide", chain=16, spread=6))
        out.append(fp8_sum(d, "e4m3", "e4m3", "wide", spread=20, registers=True))
    out.append(fp8_sum("f32", "e4m3", "e4m3", "near", chain=12))
    return out
