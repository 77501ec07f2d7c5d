"""Which thread and register hold which TMEM cell: the fragment figures of tcgen05.ld and .st."""

import numpy as np
import pytest
import torch

from dsv4.simulator import simulate_ptx

pytestmark = pytest.mark.stage("simulator")

COLUMNS = 64
# For each row of the matrix, (thread, register) of its 32-bit columns, for one repeat.
FIGURES = {
    "32x32b": [[(row, 0)] for row in range(32)],
    "16x64b": [[(4 * r, 0), (4 * r + 2, 0)] for r in range(8)]
    + [[(4 * r + 1, 0), (4 * r + 3, 0)] for r in range(8)],
    "16x128b": [[(4 * r + c, 0) for c in range(4)] for r in range(8)]
    + [[(4 * r + c, 1) for c in range(4)] for r in range(8)],
    "16x256b": [[(4 * r + c // 2, c % 2) for c in range(8)] for r in range(8)]
    + [[(4 * r + c // 2, 2 + c % 2) for c in range(8)] for r in range(8)],
    # Threads 0..15 hold the first 16 x 32 bits, 16..31 those `SPLIT` columns on.
    "16x32bx2": [[(row, 0)] for row in range(16)],
}
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
SPLIT = 24
PLACES = [("32x32b", 0), ("16x64b", 0), ("16x64b", 16), ("16x128b", 16), ("16x256b", 0),
          ("16x256b", 16), ("16x32bx2", 0), ("16x32bx2", 16)]  # fmt: skip


def _names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def _kernel(middle: str, count: int) -> str:
    """Each warp fills its lanes of 64 TMEM columns, runs `middle`, and stores registers %x."""
    fill = "\n".join(f"add.u32 %v{c}, %r4, {c};" for c in range(COLUMNS))
    out = "\n".join(f"st.global.b32 [%d2+{128 * i}], %x{i};" for i in range(count))
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.shared .align 16 .b8 place[16];
.visible .entry k(.param .b64 out)
{{
.reg .pred %p<4>; .reg .b32 %r<16>; .reg .b32 %v<{COLUMNS}>; .reg .b32 %x<128>; .reg .b64 %d<8>;
ld.param.b64 %d1, [out];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
and.b32 %r3, %r1, 31;
mov.b32 %r10, place;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], {COLUMNS};
ALLOCATED:
bar.sync 0;
ld.shared.b32 %r5, [place];
shl.b32 %r6, %r2, 21;
add.u32 %r7, %r5, %r6;
shl.b32 %r4, %r1, 6;
{fill}
tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r7], {_names("v", COLUMNS)};
tcgen05.wait::st.sync.aligned;
{middle}
mul.lo.u32 %r9, %r2, {count * 128};
shl.b32 %r11, %r3, 2;
add.u32 %r9, %r9, %r11;
cvt.u64.u32 %d3, %r9;
add.u64 %d2, %d1, %d3;
{out}
bar.sync 0;
@%p1 bra DONE;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, {COLUMNS};
DONE:
ret;
}}
"""


def _run(middle: str, count: int) -> np.ndarray:
    """Registers [4 warps, count, 32 threads] after `middle`."""
    out = torch.full((4, count, 32), -1, dtype=torch.int32)
    report = simulate_ptx(
        _kernel(middle, count), "k", grid=(1, 1, 1), block=(128, 1, 1), params=(out,)
    )
    report.raise_if_racy()
    return out.numpy()


def _cells(shape: str, repeats: int, packed: bool):
    """(row, TMEM column, thread, register, half or None) of every cell an instruction touches."""
    per = 2 if packed else 1
    for row, figure in enumerate(FIGURES[shape]):
        for repeat in range(repeats):
            for c, (thread, register) in enumerate(figure):
                for half in range(per):
                    column = (repeat * len(figure) + c) * per + half
                    place = (repeat * REGISTERS[shape] + register, half if packed else None)
                    yield row, column, thread, *place
                    if shape == "16x32bx2":
                        yield row, SPLIT + column, 16 + thread, *place


def _split(shape: str, lead: str) -> str:
    return f"{lead}{SPLIT}" if shape == "16x32bx2" else ""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(("shape", "lane"), PLACES)
def test_loads(shape, lane, repeats, packed):
    count = REGISTERS[shape] * repeats
    pack = ".pack::16b" if packed else ""
    found = _run(
        f"add.u32 %r8, %r7, {lane << 16};\n"
        f"tcgen05.ld.sync.aligned.{shape}.x{repeats}{pack}.b32 {_names('x', count)}, "
        f"[%r8]{_split(shape, ', ')};\n"
        "tcgen05.wait::ld.sync.aligned;",
        count,
    )
    for warp in range(4):
        for row, column, thread, register, half in _cells(shape, repeats, packed):
            value = int(found[warp, register, thread])
            if half is not None:
                value = value >> 16 * half & 0xFFFF
            assert value == (32 * warp + lane + row) * COLUMNS + column


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(("shape", "lane"), PLACES)
def test_stores(shape, lane, repeats, packed):
    count = REGISTERS[shape] * repeats
    unpack = ".unpack::16b" if packed else ""
    values = "\n".join(
        f"mad.lo.u32 %x{i}, %r3, 256, {i};\nmad.lo.u32 %x{i}, %x{i}, 65537, {0x4000_8000};"
        for i in range(count)
    )
    found = _run(
        f"add.u32 %r8, %r7, {lane << 16};\n{values}\n"
        f"tcgen05.st.sync.aligned.{shape}.x{repeats}{unpack}.b32 "
        f"[%r8]{_split(shape, ', ')}, {_names('x', count)};\n"
        "tcgen05.wait::st.sync.aligned;\n"
        f"tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {_names('x', COLUMNS)}, [%r7];\n"
        "tcgen05.wait::ld.sync.aligned;",
        COLUMNS,
    )
    lanes = np.arange(128)[:, None] * COLUMNS + np.arange(COLUMNS)  # [lane, column] before
    for warp in range(4):
        for row, column, thread, register, half in _cells(shape, repeats, packed):
            low = thread * 256 + register
            word = (low + 0x8000) | (low + 0x4000) << 16
            value = word if half is None else word >> 16 * half & 0xFFFF
            lanes[32 * warp + lane + row, column] = value
    after = found.transpose(0, 2, 1).reshape(128, COLUMNS).astype(np.int64) & 0xFFFFFFFF
    np.testing.assert_array_equal(after, lanes)
