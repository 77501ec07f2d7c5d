"""tcgen05.cp and .shift against tables written down from the PTX ISA: which lane gets which row."""

import numpy as np
import pytest

from dsv4.simulator import KernelFault
from tests.simulator.helpers.tmem_kernel import run_tcgen05

pytestmark = pytest.mark.stage("simulator")

# Lanes of row r, by shape and multicast: warps 0..3 own lanes 0.., 32.., 64.., 96...
LANES = {
    "128x256b": lambda r: (r,),
    "128x128b": lambda r: (r,),
    "4x256b": lambda r: (0, 32, 64, 96)[r : r + 1],
    "32x128b.warpx4": lambda r: (r, 32 + r, 64 + r, 96 + r),
    "64x128b.warpx2::02_13": lambda r: (r, 64 + r),
    "64x128b.warpx2::01_23": lambda r: (r, 32 + r) if r < 32 else (32 + r, 64 + r),
}


def _noise(seed: int, group: int, columns: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, (group, columns, 128), np.uint32)


def _plain_image(rows: np.ndarray) -> np.ndarray:
    """Rows of bytes in core matrices of 8 rows of 16 bytes; one after another along the rows."""
    count, size = rows.shape
    image = np.zeros(4096 * 2, np.uint8)
    for i in range(count):
        for chunk in range(size // 16):
            at = chunk * 4096 + i // 8 * 128 + i % 8 * 16
            image[at : at + 16] = rows[i, 16 * chunk : 16 * chunk + 16]
    return image


PLAIN = (4096 >> 4) << 16 | (128 >> 4) << 32 | 1 << 46


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("form", LANES)
def test_copies_reach_their_lanes(form, group, seed):
    shape = form.split(".")[0]
    count, size = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 8
    rows = np.random.default_rng(seed).integers(0, 256, (group, count, size), np.uint8)
    before = _noise(seed, group)
    after = run_tcgen05(
        f"add.u64 %a, %smem, {PLAIN};\nadd.u32 %off, %tmem, 16;\n"
        f"tcgen05.cp.cta_group::{group}.{form} [%off], %a;",
        np.stack([_plain_image(r) for r in rows]), before,
    )  # fmt: skip
    expected = before.copy()
    for cta in range(group):
        for r in range(count):
            for lane in LANES[form](r):
                expected[cta, 16 : 16 + size // 4, lane] = rows[cta, r].view(np.uint32)
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("form", LANES)
@pytest.mark.parametrize(("name", "bits", "shift"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 1)])
def test_decompressing_copies(form, name, bits, shift, seed):
    """16 packed elements and their padding become 16 bytes: 00xxxx00, 0xxxxxx0."""
    shape = form.split(".")[0]
    count, size = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 8
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 1 << bits, (count, size), np.uint8)
    rows = generator.integers(0, 256, (count, size), np.uint8)  # the padding is not read
    for r in range(count):
        for chunk in range(0, size, 16):
            packed = sum(int(c) << bits * i for i, c in enumerate(codes[r, chunk : chunk + 16]))
            data = np.frombuffer(packed.to_bytes(2 * bits, "little"), np.uint8)
            rows[r, chunk : chunk + 2 * bits] = data
    before = _noise(seed, 1)
    after = run_tcgen05(
        f"add.u64 %a, %smem, {PLAIN};\n"
        f"tcgen05.cp.cta_group::1.{form}.b8x16.{name} [%tmem], %a;",
        _plain_image(rows)[None], before,
    )  # fmt: skip
    expected = before.copy()
    for r in range(count):
        for lane in LANES[form](r):
            expected[0, : size // 4, lane] = (codes[r] << shift).view(np.uint32)
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_shift_moves_31_rows_of_256_bits(group, schedule, seed):
    before = _noise(seed, group)
    after = run_tcgen05(
        f"add.u32 %off, %tmem, {64 << 16 | 8};\ntcgen05.shift.cta_group::{group}.down [%off];",
        np.zeros((group, 16), np.uint8), before, schedule,
    )  # fmt: skip
    expected = before.copy()
    expected[:, 8:16, 64:95] = before[:, 8:16, 65:96]
    np.testing.assert_array_equal(after, expected)


def test_shift_needs_a_whole_warp(seed):
    with pytest.raises(KernelFault, match=r"tcgen05\.shift of TMEM lane 16"):
        run_tcgen05(
            f"add.u32 %off, %tmem, {16 << 16};\ntcgen05.shift.cta_group::1.down [%off];",
            np.zeros((1, 16), np.uint8), _noise(seed, 1),
        )  # fmt: skip
