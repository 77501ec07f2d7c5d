"""Block-scaled tcgen05.mma: scale factors laid out by hand in TMEM, as the ISA's figures show them.

Row r of A's scales (column r of B's) is in lane r mod 32 of word r / 32, and again in the other
three groups of 32 lanes; one scale is the byte the scale id names, two are the half word, four the
whole word. On the 2 x 2 data path of a pair with M = 128 each half of the lanes holds the scales of
the half of B that it multiplies.
"""

import numpy as np
import pytest

from tests.simulator.helpers.tmem_kernel import run_tcgen05
from tests.simulator.instructions.test_tcgen05_products import (
    B_PLACE,
    LAYOUTS,
    SHARED,
    Image,
    close,
    draw,
    small_float,
    unpack,
)

pytestmark = pytest.mark.stage("simulator")

SCALES_A, SCALES_B, COLUMNS = 128, 136, 256  # TMEM columns; D is at 0
CODE = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


def _draw_scales(generator, rows: int, count: int, exponents: bool):
    """Codes and values: powers of two, or unsigned e4m3."""
    if exponents:
        codes = generator.integers(124, 131, (rows, count), np.uint8)
        return codes, 2.0 ** (codes.astype(float) - 127)
    codes = generator.integers(0x20, 0x50, (rows, count), np.uint8)
    return codes, small_float(codes, "e4m3")


def _place_scales(tmem, column: int, codes, first_byte: int, lanes=range(0, 128, 32)) -> None:
    """Write scale codes [rows, count] into TMEM [columns, lanes]."""
    cells = tmem.view(np.uint8).reshape(*tmem.shape, 4)
    for r, row in enumerate(codes):
        for lane in lanes:
            place = cells[column + r // 32, lane + r % 32]
            place[first_byte : first_byte + len(row)] = row


def _packed_image(codes: np.ndarray) -> Image:
    """Two 4-bit elements to a byte, in core matrices of 8 rows of 16 bytes."""
    rows = codes[:, 0::2] | codes[:, 1::2] << 4
    image = np.zeros(B_PLACE, np.uint8)
    for i, row in enumerate(rows):
        for chunk in range(len(row) // 16):
            at = i // 8 * 512 + chunk * 128 + i % 8 * 16
            image[at : at + 16] = row[16 * chunk : 16 * chunk + 16]
    return Image(image, (128 >> 4) << 16 | (512 >> 4) << 32 | 1 << 46)


# Kind, types of A and B, scales per row, exponent-only scales, scale ids of A and B.
FORMS = [
    *(("mxf8f6f4", a, b, ".scale_vec::1X", 1, True, i, 3 - i)
      for i, (a, b) in enumerate([("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e3m2", "e2m1"),
                                  ("e2m3", "e3m2")])),
    ("mxf4", "e2m1", "e2m1", ".scale_vec::2X", 2, True, 0, 2),
    ("mxf4", "e2m1", "e2m1", "", 2, True, 2, 0),
    ("mxf4nvf4", "e2m1", "e2m1", ".scale_vec::2X", 2, True, 2, 2),
    ("mxf4nvf4", "e2m1", "e2m1", ".scale_vec::4X", 4, False, 0, 0),
    ("mxf4nvf4", "e2m1", "e2m1", ".block16", 4, True, 0, 0),
    ("mxf8f6f4", "e4m3", "e4m3", ".block32", 1, True, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("m", "n", "group"),
    [(128, 64, 1), *(pytest.param(*p, marks=pytest.mark.slow) for p in
     [(128, 8, 1), (128, 128, 1), (256, 128, 2), (128, 96, 2)])],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "a_name", "b_name", "size", "count", "exponents", "a_id", "b_id"),
                         FORMS)  # fmt: skip
def test_block_scaled_products(
    kind, a_name, b_name, size, count, exponents, a_id, b_id, m, n, group, seed
):
    generator = np.random.default_rng(seed)
    four_bits = kind != "mxf8f6f4"
    layout = "mn" if size == ".block32" and m == n else "plain"
    depth = 64 if four_bits else 32
    a_codes, a = draw(generator, a_name, m, depth)
    b_codes, b = draw(generator, b_name, n, depth)
    sa_codes, sa = _draw_scales(generator, m, count, exponents)
    sb_codes, sb = _draw_scales(generator, n, count, exponents)
    rows, share = m // group, n // group
    shared = np.zeros((group, SHARED), np.uint8)
    tmem = np.zeros((group, COLUMNS, 128), np.uint32)
    for cta in range(group):
        parts = (a_codes[cta * rows : (cta + 1) * rows], b_codes[cta * share : (cta + 1) * share])
        if four_bits:
            images = [_packed_image(p) for p in parts]
        else:
            images = [LAYOUTS[layout](p, name) for p, name in zip(parts, (a_name, b_name))]
        shared[cta, :B_PLACE], shared[cta, B_PLACE:] = images[0].data, images[1].data
        _place_scales(tmem[cta], SCALES_A, sa_codes[cta * rows : (cta + 1) * rows], a_id)
        if group == 2 and m == 128:
            for half in range(2):
                columns = sb_codes[half * n // 2 : (half + 1) * n // 2]
                _place_scales(tmem[cta], SCALES_B, columns, b_id, (64 * half, 64 * half + 32))
        else:
            _place_scales(tmem[cta], SCALES_B, sb_codes, b_id)
    codes = (1, 1) if four_bits else (CODE[a_name], CODE[b_name])
    idesc = (
        b_id << 4 | codes[0] << 7 | codes[1] << 10 | (layout == "mn") * 3 << 15
        | n >> 3 << 17 | exponents << 23 | m >> 7 << 27 | a_id << 29
    )  # fmt: skip
    after = run_tcgen05(
        f"add.u64 %a, %smem, {images[0].descriptor};\n"
        f"add.u64 %b, %smem, {images[1].descriptor + (B_PLACE >> 4)};\n"
        f"mov.b32 %idesc, {idesc};\n"
        f"add.u32 %v0, %tmem, {SCALES_A};\nadd.u32 %v1, %tmem, {SCALES_B};\n"
        f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale{size} "
        "[%tmem], %a, %b, %idesc, [%v0], [%v1], %new;",
        shared, tmem,
    )  # fmt: skip
    per = depth // count
    expected = (a * np.repeat(sa, per, 1)) @ (b * np.repeat(sb, per, 1)).T
    found = unpack(after, m, n, group, False).view(np.float32).astype(float)
    close(found, expected, seed)
