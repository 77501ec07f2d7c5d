"""Loads, stores, atomics, matrix loads and stores, and non-bulk asynchronous copies."""

from __future__ import annotations

import numpy as np

from tests.simulator.hardware.case import Buffer, Case, Row, module, poisoned
from tests.simulator.hardware.inputs import random_bytes, random_words, small_integers
from tests.simulator.hardware.snippets import PROLOGUE, copy_in, copy_out

_POINTERS = "ld.param.u64 %out, [out];\nld.param.u64 %in, [in];\n"
THREADS = 128


def _permutation(seed: str, count: int) -> np.ndarray:
    return np.argsort(random_words(seed, count), kind="stable").astype(np.uint32)


def _matrix_loads() -> Case:
    """ldmatrix of rows scattered over 4 KB."""
    size = 4096
    lines, rows = [PROLOGUE, _POINTERS, copy_in("%in", "%smem", size, 32)], []
    lines.append(f"mad.wide.u32 %at, %lane, 4, %in; ld.global.b32 %r8, [%at+{size}];")
    lines.append("add.u32 %r8, %r8, %smem; mad.wide.u32 %at, %lane, 4, %out;")
    for count in (1, 2, 4):
        registers = ", ".join(f"%r{k}" for k in range(count))
        for form in ("", ".trans"):
            name = f"ldmatrix.sync.aligned.m8n8.x{count}{form}.shared.b16"
            lines.append(f"{name} {{{registers}}}, [%r8];")
            for k in range(count):
                lines.append(f"st.global.b32 [%at+{128 * len(rows)}], %r{k};")
                rows.append(Row(f"{name} register {k}", 128))
    addresses = _permutation("ldmatrix", size // 16)[:32] * np.uint32(16)
    data = np.concatenate([random_bytes("ldmatrix data", size), addresses.view(np.uint8)])
    return Case(
        "ldmatrix",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(128 * len(rows)), data),
        (Buffer(0), Buffer(1)),
        shared=size,
    )


def _matrix_stores() -> Case:
    """stmatrix to rows scattered over 4 KB, one image per form."""
    size = 4096
    lines, rows = [PROLOGUE, _POINTERS], []
    lines.append(f"mad.wide.u32 %at, %lane, 4, %in; ld.global.b32 %r8, [%at+{size}];")
    lines.append("add.u32 %r8, %r8, %smem;")
    lines += [f"ld.global.b32 %r{k}, [%at+{128 * k}];" for k in range(4)]
    for count in (1, 2, 4):
        registers = ", ".join(f"%r{k}" for k in range(count))
        for form in ("", ".trans"):
            name = f"stmatrix.sync.aligned.m8n8.x{count}{form}.shared.b16"
            lines.append(copy_in("%in", "%smem", size, 32))
            lines.append(f"{name} [%r8], {{{registers}}};\nbar.sync 0;")
            lines.append(copy_out("%smem", "%out", size, 32))
            lines.append(f"add.u64 %out, %out, {size};")
            rows.append(Row(name, size))
    addresses = _permutation("stmatrix", size // 16)[:32] * np.uint32(16)
    data = np.concatenate([random_bytes("stmatrix data", size), addresses.view(np.uint8)])
    return Case(
        "stmatrix",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(size * len(rows)), data),
        (Buffer(0), Buffer(1)),
        shared=size,
    )


# (instruction after the state space, operand, words per element); values %r1, %d1, %r2, %d2.
_REDUCTIONS = (
    ("add.u32", "%r1", 4), ("add.s32", "%r1", 4), ("min.u32", "%r1", 4), ("min.s32", "%r1", 4),
    ("max.u32", "%r1", 4), ("max.s32", "%r1", 4), ("and.b32", "%r1", 4), ("or.b32", "%r1", 4),
    ("xor.b32", "%r1", 4), ("inc.u32", "%r2", 4), ("dec.u32", "%r2", 4), ("add.u64", "%d1", 8),
    ("min.s64", "%d1", 8), ("max.u64", "%d1", 8), ("and.b64", "%d1", 8), ("or.b64", "%d1", 8),
    ("xor.b64", "%d1", 8),
)  # fmt: skip
_FLOAT_SUMS = (
    ("add.f32", "%r4", 4, "f32"), ("add.noftz.f16x2", "%r5", 4, "f16"),
    ("add.noftz.bf16x2", "%r6", 4, "bf16"), ("add.f64", "%d2", 8, None),
)  # fmt: skip
_CELLS = 16


def _reductions(space: str) -> Case:
    """red on 16 contended cells. Floating-point sums are of small integers: order is no matter."""
    lines, rows = [PROLOGUE, _POINTERS], []
    inputs, offset = [], 0

    def load(register: str, data: np.ndarray) -> None:
        nonlocal offset
        width = data.dtype.itemsize
        lines.append(f"mad.wide.u32 %at, %thread, {width}, %in;")
        lines.append(f"ld.global.b{8 * width} {register}, [%at+{offset}];")
        inputs.append(data.view(np.uint8))
        offset += data.nbytes

    small = small_integers("sums", THREADS, 8)
    half = small.astype(np.float16).view(np.uint16).astype(np.uint32)
    brain = small.astype(np.float32).view(np.uint32) >> np.uint32(16)
    load("%r0", random_words("cells", THREADS) % np.uint32(_CELLS))
    load("%r1", random_words("values", THREADS))
    load("%r2", np.full(THREADS, 5, np.uint32))
    load("%r4", small.astype(np.float32).view(np.uint32))
    load("%r5", half | half[::-1] << np.uint32(16))
    load("%r6", brain | brain[::-1] << np.uint32(16))
    load("%d1", random_words("wide values", 2 * THREADS).view(np.uint64))
    load("%d2", small.astype(np.float64).view(np.uint64))
    lines.append("mov.u32 %r9, 0; mov.u64 %d3, 0;")
    total = 0
    for op, value, size, *floats in (*_REDUCTIONS, *_FLOAT_SUMS):
        if space == "shared":
            lines.append(f"mad.lo.u32 %r8, %r0, {size}, %smem;")
            lines.append("shl.b32 %r10, %thread, 3; add.u32 %r10, %r10, %smem;")
            lines.append(f"setp.lt.u32 %p0, %thread, {_CELLS};")
            lines.append("bar.sync 0; @%p0 st.shared.b64 [%r10], %d3; bar.sync 0;")
            lines.append(f"red.shared.{op} [%r8], {value};")
            lines.append(f"bar.sync 0;\n{copy_out('%smem', '%out', size * _CELLS, THREADS)}")
        else:
            lines.append(f"mad.wide.u32 %at, %r0, {size}, %out;")
            lines.append(f"red.global.{op} [%at], {value};")
        lines.append(f"add.u64 %out, %out, {size * _CELLS};")
        rows.append(Row(f"red.{space}.{op}", size * _CELLS, *floats[:1]))
        total += size * _CELLS
    return Case(
        f"red {space}",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (np.zeros(total, np.uint8), np.concatenate(inputs)),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=8 * _CELLS,
    )


_ATOMICS = (
    ("add.u32", "%r1", None), ("min.s32", "%r1", None), ("max.u32", "%r1", None),
    ("exch.b32", "%r1", None), ("cas.b32", "%r3, %r1", None), ("inc.u32", "%r1", None),
    ("dec.u32", "%r1", None), ("and.b32", "%r1", None), ("or.b32", "%r1", None),
    ("xor.b32", "%r1", None), ("add.f32", "%r1", "f32"), ("add.noftz.f16x2", "%r1", "f16"),
    ("add.noftz.bf16x2", "%r1", "bf16"), ("add.u64", "%d1", None), ("exch.b64", "%d1", None),
    ("cas.b64", "%d4, %d1", None), ("max.s64", "%d1", None), ("add.f64", "%d1", "f64"),
)  # fmt: skip
_ATOMIC_FLOATS = [
    0x00000000, 0x80000000, 0x3F800000, 0x00000001, 0x007FFFFF, 0x80000001, 0x00800000, 0x7F7FFFFF,
    0x7F800000, 0xFF800000, 0x7FC00000, 0x3C003C00, 0x00010001, 0x03FF83FF, 0x7BFF7BFF, 0x7F7F7F7F,
]  # fmt: skip


def _atomics(space: str) -> Case:
    """atom on a cell per thread: the old value and the memory afterwards."""
    lines, rows = [PROLOGUE, _POINTERS], []
    cells, values = random_words("atom cells", 256), random_words("atom values", 256)
    n = len(_ATOMIC_FLOATS)
    cells[: 8 * n] = np.repeat(_ATOMIC_FLOATS, 8)
    values[: 8 * n] = np.tile(_ATOMIC_FLOATS, 8)
    comparands = np.where(random_words("hits", 256) & np.uint32(1), cells, values)
    data = np.concatenate([cells, values, comparands]).view(np.uint8)
    loads = "mad.wide.u32 %at, %thread, {w}, %in; ld.global.b{b} {0}, [%at];\n"
    loads += "ld.global.b{b} {1}, [%at+1024]; ld.global.b{b} {2}, [%at+2048];"
    for op, operands, floats in _ATOMICS:
        wide = "%d1" in operands
        width = 8 if wide else 4
        size = THREADS * width
        cell, value, comparand, old = (
            ("%d0", "%d1", "%d4", "%d5") if wide else ("%r0", "%r1", "%r3", "%r5")
        )
        lines.append(loads.format(cell, value, comparand, w=width, b=8 * width))
        lines.append(f"mad.wide.u32 %at, %thread, {width}, %out;")
        if space == "shared":
            # Cells of this width overlap those of the other width, which other threads used.
            lines.append(f"bar.sync 0; mad.lo.u32 %r8, %thread, {width}, %smem;")
            lines.append(f"st.shared.b{8 * width} [%r8], {cell};")
            lines.append(f"atom.shared.{op} {old}, [%r8], {operands};")
            lines.append(f"ld.shared.b{8 * width} {cell}, [%r8];")
            lines.append(f"st.global.b{8 * width} [%at], {cell};")
        else:
            lines.append(f"st.global.b{8 * width} [%at], {cell};")
            lines.append(f"atom.global.{op} {old}, [%at], {operands};")
        lines.append(f"st.global.b{8 * width} [%at+{size}], {old};")
        lines.append(f"add.u64 %out, %out, {2 * size};")
        rows.append(Row(f"atom.{space}.{op} memory", size, floats))
        rows.append(Row(f"atom.{space}.{op} old", size))
    return Case(
        f"atom {space}",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(sum(r.size for r in rows)), data),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=8 * THREADS,
    )


def _vector_reductions() -> Case:
    """red.global on vectors, a vector per thread."""
    lines, rows = [PROLOGUE, _POINTERS], []
    lines.append("mad.wide.u32 %at, %thread, 16, %in;")
    lines.append("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%at];")
    lines.append("mad.wide.u32 %at, %thread, 16, %out;")
    forms = (
        ("v2.f32.add", 2, "f32"), ("v4.f32.add", 4, "f32"), ("v2.f16x2.add.noftz", 2, "f16"),
        ("v4.f16x2.add.noftz", 4, "f16"), ("v4.bf16x2.add.noftz", 4, "bf16"),
        ("v4.f16x2.min.noftz", 4, "f16"), ("v4.bf16x2.max.noftz", 4, "bf16"),
    )  # fmt: skip
    size = 16 * THREADS
    for form, count, floats in forms:
        registers = ", ".join(f"%r{k}" for k in range(count))
        lines.append(f"red.global.{form} [%at], {{{registers}}};\nadd.u64 %at, %at, {size};")
        rows.append(Row(f"red.global.{form}", size, floats))
    data = random_bytes("vector reductions", size)
    image = np.tile(random_bytes("vector cells", size), len(rows))
    return Case(
        "red vectors",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (image, data),
        (Buffer(0), Buffer(1)),
        block=THREADS,
    )


def _copies() -> Case:
    """cp.async of 4, 8 and 16 bytes, whole, and with fewer source bytes."""
    lines, rows = [PROLOGUE, _POINTERS], []
    lines.append(f"mad.wide.u32 %at, %thread, 4, %in; ld.global.b32 %r0, [%at+{16 * THREADS}];")
    for form, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        for limited in (False, True):
            image = size * THREADS
            lines.append(f"mad.lo.u32 %r8, %thread, {size}, %smem; xor.b32 %r8, %r8, {size};")
            lines.append(f"mad.wide.u32 %at, %thread, {size}, %in; rem.u32 %r1, %r0, {size + 1};")
            operand = ", %r1" if limited else ""
            lines.append(copy_in("%in", "%smem", image, THREADS))
            lines.append(f"cp.async.{form}.shared.global [%r8], [%at], {size}{operand};")
            lines.append("cp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 0;")
            lines.append(copy_out("%smem", "%out", image, THREADS))
            lines.append(f"add.u64 %out, %out, {image};")
            rows.append(Row(f"cp.async.{form} {size}{' limited' if limited else ''}", image))
    data = np.concatenate(
        [random_bytes("cp.async", 16 * THREADS), random_words("sizes", THREADS).view(np.uint8)]
    )
    return Case(
        "cp.async",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(sum(r.size for r in rows)), data),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=16 * THREADS,
    )


_ACCESSES = """
ld.global.s8 %r0, [%d0+3];
ld.global.u8 %r0, [%d0+3];
ld.global.s16 %r0, [%d0+2];
ld.global.u16 %r0, [%d0+6];
ld.shared.s8 %r0, [%r8+5];
ld.shared.u16 %r0, [%r8+10];
ld.global.v2.b16 {%h0, %h1}, [%d0+4]; mov.b32 %r0, {%h1, %h0};
ld.global.v4.u8 {%h0, %h1, %h2, %h3}, [%d0+8]; shl.b16 %h3, %h3, 8; or.b16 %h0, %h0, %h3; mov.b32 %r0, {%h0, %h1};
ld.global.nc.v4.b32 {%r1, %r2, %r3, %r0}, [%d0]; xor.b32 %r0, %r0, %r2;
ld.shared.v4.b32 {%r1, %r0, %r3, %r2}, [%r8]; sub.u32 %r0, %r0, %r3;
ld.global.v2.b64 {%d2, %d3}, [%d0]; xor.b64 %d2, %d2, %d3; cvt.u32.u64 %r0, %d2;
ld.b32 %r0, [%d0+12];
cvt.u64.u32 %d2, %r8; cvta.shared.u64 %d2, %d2; ld.b32 %r0, [%d2+4];
cvt.u64.u32 %d2, %r8; cvta.shared.u64 %d2, %d2; cvta.to.shared.u64 %d2, %d2; cvt.u32.u64 %r1, %d2; ld.shared.b32 %r0, [%r1];
cvt.u64.u32 %d2, %r8; cvta.shared.u64 %d2, %d2; isspacep.shared %p0, %d2; selp.u32 %r0, 5, 6, %p0;
isspacep.shared %p0, %d0; isspacep.global %p1, %d0; selp.u32 %r0, 5, 6, %p0; selp.u32 %r1, 8, 16, %p1; or.b32 %r0, %r0, %r1;
st.shared.v2.b16 [%r8], {%h4, %h5}; ld.shared.b32 %r0, [%r8];
st.shared.u8 [%r8+7], %r7; ld.shared.b32 %r0, [%r8+4];
st.local.v2.b32 [frame+8], {%r7, %r6}; ld.local.b32 %r0, [frame+12];
st.local.b16 [frame+2], %h4; st.local.b16 [frame], %h5; ld.local.b32 %r0, [frame];
ld.global.b32 %r0, [table+8];
ld.const.u16 %r0, [constants+2];
"""  # noqa: E501


def _accesses() -> Case:
    """Sub-word, vector, generic and local accesses; initialised module variables."""
    size = 16 * THREADS
    lines = [PROLOGUE, ".reg .b16 %h<8>;\n.local .align 16 .b8 frame[32];", _POINTERS]
    lines.append("mad.wide.u32 %d0, %thread, 16, %in; mad.wide.u32 %at, %thread, 4, %out;")
    lines.append("mad.lo.u32 %r8, %thread, 16, %smem; ld.global.v2.b32 {%r6, %r7}, [%d0];")
    lines.append("mov.b32 {%h4, %h5}, %r7;")
    rows = []
    for text in _ACCESSES.strip().splitlines():
        lines.append(copy_in("%in", "%smem", size, THREADS))
        lines.append(
            f"{{ {text} }}\nst.global.b32 [%at+{4 * THREADS * len(rows)}], %r0;\nbar.sync 0;"
        )
        rows.append(Row(text, 4 * THREADS))
    variables = (
        ".global .align 4 .b32 table[4] = {1, 2, 0x89abcdef, 4};\n"
        ".const .align 2 .b16 constants[2] = {7, 65535};\n"
    )
    ptx = module("\n".join(lines), "u64 out, u64 in")
    return Case(
        "accesses",
        ptx.replace(".extern", variables + ".extern", 1),
        tuple(rows),
        (poisoned(4 * THREADS * len(rows)), random_bytes("accesses", size)),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=size,
    )


def cases() -> list[Case]:
    """The memory programs."""
    return [
        _matrix_loads(), _matrix_stores(), _reductions("shared"), _reductions("global"),
        _atomics("shared"), _atomics("global"), _vector_reductions(), _copies(), _accesses(),
    ]  # fmt: skip
