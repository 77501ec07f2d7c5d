"""Prepared weights: where each element lies, and that every byte comes back."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.moe import layout as kernel_layout
from dsv4.ops.moe import layout
from dsv4.ops.quantize import unpack_e2m1

pytestmark = pytest.mark.stage("moe")

ROWS, COLUMNS = 128, 384


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words_of(prepared: torch.Tensor, *shape: int) -> torch.Tensor:
    return prepared.contiguous().view(torch.uint8).view(-1, 4).view(torch.int32).view(shape)


@pytest.mark.parametrize("form", layout.FORMS)
def test_fp4_codes_lie_where_lanes_read_them(form, seed) -> None:
    codes = random_bytes(ROWS, COLUMNS // 2).view(torch.int8)
    nibbles = unpack_e2m1(codes).int()
    words = words_of(layout.prepare_fp4_codes(codes, form), ROWS // 32, COLUMNS // 128, 4, 32, 4)
    for _ in range(300):
        panel, block, unit, lane, step = (int(torch.randint(n, ())) for n in words.shape)
        word = int(words[panel, block, unit, lane, step]) & 0xFFFFFFFF
        row = 32 * panel + 8 * unit + lane // 4
        for j in range(8):
            k = 128 * block + 32 * (lane % 4) + 8 * step + j
            if form == "raw":
                k = 128 * block + 32 * step + 4 * (lane % 4) + j % 4 + 16 * (j // 4)
            sign = 8 * j + 3 if j < 4 else 8 * (j - 4) + 7
            assert word >> 4 * j & 7 == nibbles[row, k] & 7
            assert word >> sign & 1 == nibbles[row, k] >> 3


def test_fp8_codes_lie_where_lanes_read_them(seed) -> None:
    codes = random_bytes(ROWS, COLUMNS)
    words = words_of(layout.prepare_fp8_codes(codes), ROWS // 32, COLUMNS // 128, 4, 2, 32, 2, 2)
    for _ in range(300):
        panel, block, unit, half, lane, step, q = (int(torch.randint(n, ())) for n in words.shape)
        word = int(words[panel, block, unit, half, lane, step, q]) & 0xFFFFFFFF
        row = 32 * panel + 8 * unit + lane // 4
        k = 128 * block + 32 * (2 * half + step) + 16 * q + 4 * (lane % 4)
        assert word == int.from_bytes(bytes(codes[row, k : k + 4].tolist()), "little")


def test_codes_of_tokens_lie_in_the_order_of_weights_whose_scales_fold() -> None:
    words = list(range(32))
    places = [kernel_layout.interleaved_place(word) for word in words]
    assert sorted(places) == words
    assert [kernel_layout.interleaved_word(place) for place in places] == words
    # A lane's words of a step are two of its group, in the first and the second half of the step.
    for word, place in enumerate(places):
        step, half, lane = place // 8, place // 4 % 2, place % 4
        assert word == 8 * lane + 2 * step + half


@pytest.mark.parametrize("form", layout.FORMS)
def test_fp4_scales_lie_by_row_of_a_block(form, seed) -> None:
    blocks = 1 if form == "row_packed" else COLUMNS // 128
    low = torch.randint(2, 244, (ROWS, blocks, 1), dtype=torch.uint8)
    above = torch.randint(0, 12, (ROWS, COLUMNS // 128, 4), dtype=torch.uint8)
    scale = (low + above).view(ROWS, -1).view(torch.float8_e8m0fnu)
    assert layout.fits_packed(scale)
    assert layout.fits_packed(scale, "row_packed") == (form == "row_packed")
    words = words_of(layout.prepare_fp4_scales(scale, form), ROWS // 32, COLUMNS // 128, 32)
    exponents = scale.view(torch.uint8).view(ROWS, -1, 4).int()
    for row in range(ROWS):
        for block in range(COLUMNS // 128):
            word = int(words[row // 32, block, row % 32]) & 0xFFFFFFFF
            e = exponents[row, block].tolist()
            least = int(exponents[row].min())
            half = least >> 4 if block % 2 else least & 0xF
            wanted = {
                "packed": fields(e, min(e), (0, 4, 8, 12)) | min(e) << 24,
                "row_packed": fields(e, least, (0, 8, 16, 28)) | half << 24,
                "raw": fields(e, 0, (0, 8, 16, 24)),
            }
            assert word == wanted[form]


def fields(exponents: list[int], least: int, places: tuple[int, ...]) -> int:
    """Distances from the least one, at their places in a word."""
    return sum(e - least << place for e, place in zip(exponents, places))


def test_tiles_have_their_rows_one_behind_the_other(seed) -> None:
    rows, blocks = 2 * ROWS, COLUMNS // 128
    for codes, size in (
        (random_bytes(rows, COLUMNS // 2).view(torch.int8), 64),
        (random_bytes(rows, COLUMNS).view(torch.float8_e4m3fn), 128),
    ):
        found = layout.prepare_codes(codes, "tiled").view(torch.uint8).view(-1, blocks, 128, size)
        released = codes.view(torch.uint8)
        for tile, block, row in ((0, 0, 0), (1, 2, 127), (1, 1, 33), (0, 2, 64)):
            wanted = released[128 * tile + row, size * block : size * (block + 1)]
            assert torch.equal(found[tile, block, row], wanted)


def test_scales_of_tiles_lie_as_the_tensor_core_reads_them(seed) -> None:
    scale = random_bytes(2 * ROWS, COLUMNS // 32).view(torch.float8_e8m0fnu)
    found = layout.prepare_fp4_scales(scale, "tiled").view(torch.uint8).view(2, -1, 32, 4, 4)
    released = scale.view(torch.uint8)
    for tile, block, lane, part, group in ((0, 0, 0, 0, 0), (1, 2, 31, 3, 3), (1, 1, 5, 2, 1)):
        row = 128 * tile + 32 * part + lane
        assert found[tile, block, lane, part, group] == released[row, 4 * block + group]


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_every_byte_comes_back(lead, seed) -> None:
    fp4 = random_bytes(*lead, ROWS, COLUMNS // 2).view(torch.int8)
    fp8 = random_bytes(*lead, ROWS, COLUMNS).view(torch.float8_e4m3fn)
    scale = random_bytes(*lead, ROWS, COLUMNS // 32).view(torch.float8_e8m0fnu)
    narrow = (scale.view(torch.uint8) % 12 + 100).view(torch.float8_e8m0fnu)
    for there, back, tensor in (
        *((lambda x, form=form: layout.prepare_fp4_codes(x, form),
           lambda x, form=form: layout.restore_fp4_codes(x, form), fp4) for form in layout.FORMS),
        (layout.prepare_fp8_codes, layout.restore_fp8_codes, fp8),
        (lambda x: layout.prepare_fp4_scales(x, "raw"),
         lambda x: layout.restore_fp4_scales(x, "raw"), scale),
        (lambda x: layout.prepare_fp4_scales(x, "packed"),
         lambda x: layout.restore_fp4_scales(x, "packed"), narrow),
        (lambda x: layout.prepare_fp4_scales(x, "row_packed"),
         lambda x: layout.restore_fp4_scales(x, "row_packed"), narrow),
        (lambda x: layout.prepare_codes(x, "tiled"),
         lambda x: layout.restore_codes(x, "tiled"), fp4),
        (lambda x: layout.prepare_codes(x, "tiled"),
         lambda x: layout.restore_codes(x, "tiled"), fp8),
        (lambda x: layout.prepare_fp4_scales(x, "tiled"),
         lambda x: layout.restore_fp4_scales(x, "tiled"), scale),
    ):  # fmt: skip
        moved = there(tensor)
        assert (moved.shape, moved.dtype) == (tensor.shape, tensor.dtype)
        assert not torch.equal(moved.view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(back(moved).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("exponents", [(100, 112, 100, 100), (0, 1, 2, 3), (255, 250, 250, 250)])
def test_what_does_not_fit_the_packed_form(exponents) -> None:
    scale = torch.full((64, 8), 120, dtype=torch.uint8)
    assert layout.fits_packed(scale.view(torch.float8_e8m0fnu))
    assert layout.fits_packed(scale.view(torch.float8_e8m0fnu), "row_packed")
    scale[17, 4:] = torch.tensor(exponents, dtype=torch.uint8)
    assert not layout.fits_packed(scale.view(torch.float8_e8m0fnu))
    assert not layout.fits_packed(scale.view(torch.float8_e8m0fnu), "row_packed")


def test_what_fits_by_k_block_alone() -> None:
    scale = torch.full((64, 8), 120, dtype=torch.uint8)
    scale[17, 4:] = 108
    scale = scale.view(torch.float8_e8m0fnu)
    assert layout.fits_packed(scale)
    assert not layout.fits_packed(scale, "row_packed")


@pytest.mark.parametrize("form", ["packed", "row_packed"])
def test_groups_without_values_fit(form) -> None:
    """They have the exponent 1; a row of the second k block has no others, and one of neither."""
    exponents = torch.full((64, 3, 4), 120, dtype=torch.uint8)
    exponents[:, :, 1] = 117
    exponents[5, 1, 2], exponents[6, 1], exponents[7] = 1, 1, 1
    scale = exponents.view(64, 12).view(torch.float8_e8m0fnu)
    assert layout.fits_packed(scale, form)
    prepared = layout.prepare_fp4_scales(scale, form)
    words = words_of(prepared, 2, 3, 32)
    places = (0, 4, 8, 12) if form == "packed" else (0, 8, 16, 28)
    for row, distances in ((4, [3, 0, 3, 3]), (5, [3, 0, 15, 3]), (6, [15] * 4), (7, [15] * 4)):
        word = int(words[0, 1, row]) & 0xFFFFFFFF
        assert [word >> place & 0xF for place in places] == distances, row
        if form == "packed":
            assert word >> 24 == {4: 117, 5: 117, 6: 1, 7: 1}[row], row
    restored = layout.restore_fp4_scales(prepared, form)
    assert torch.equal(restored.view(torch.uint8), scale.view(torch.uint8))


def test_a_row_of_one_k_block_has_no_room_for_its_exponent() -> None:
    scale = torch.full((64, 4), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert layout.fits_packed(scale)
    assert not layout.fits_packed(scale, "row_packed")


def test_weights_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be a multiple of 32, got 72"):
        layout.prepare_fp8_codes(torch.zeros(72, 128, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="columns must be a multiple of 128, got 192"):
        layout.prepare_fp4_codes(torch.zeros(64, 96, dtype=torch.int8), "packed")
    with pytest.raises(ValueError, match="rows must be a multiple of 128, got 64"):
        layout.prepare_codes(torch.zeros(64, 128, dtype=torch.float8_e4m3fn), "tiled")
    with pytest.raises(ValueError, match="columns must be a multiple of 128, got"):
        layout.prepare_codes(torch.zeros(128, 96, dtype=torch.int8), "tiled")


def test_nvfp4_codes_lie_where_lanes_read_them(seed) -> None:
    codes = random_bytes(ROWS, COLUMNS // 2)
    nibbles = unpack_e2m1(codes).int()
    words = words_of(layout.prepare_codes(codes, "packed"), ROWS // 32, COLUMNS // 128, 4, 32, 4)
    for _ in range(300):
        panel, block, unit, lane, w = (int(torch.randint(n, ())) for n in words.shape)
        word = int(words[panel, block, unit, lane, w]) & 0xFFFFFFFF
        row = 32 * panel + 8 * unit + lane // 4
        for pair, (magnitude, sign) in enumerate(((6, 15), (3, 12), (0, 13), (9, 14))):
            step, half = 2 * w + pair // 2, pair % 2
            for odd in range(2):
                k = 128 * block + 16 * step + 8 * half + 2 * (lane % 4) + odd
                assert word >> (magnitude + 16 * odd) & 7 == nibbles[row, k] & 7
                assert word >> (sign + 16 * odd) & 1 == nibbles[row, k] >> 3


def test_bf16_weights_lie_where_lanes_read_them(seed) -> None:
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    prepared = layout.prepare_codes(weight, "packed")
    lanes = prepared.view(ROWS // 32, COLUMNS // 128, 4, 4, 32, 2, 2, 2)
    for _ in range(300):
        place = tuple(int(torch.randint(n, ())) for n in lanes.shape)
        panel, block, unit, vector, lane, step, half, odd = place
        row = 32 * panel + 8 * unit + lane // 4
        k = 128 * block + 16 * (2 * vector + step) + 8 * half + 2 * (lane % 4) + odd
        assert lanes[place] == weight[row, k]


def test_nvfp4_scales_lie_by_row_of_a_block(seed) -> None:
    scale = random_bytes(ROWS, COLUMNS // 16)
    prepared = layout.prepare_scales(scale.view(torch.float8_e4m3fn), "packed").view(torch.uint8)
    rows = prepared.view(ROWS // 32, COLUMNS // 128, 32, 8)
    for row in range(ROWS):
        found = rows[row // 32, :, row % 32].flatten()
        assert torch.equal(found, scale[row])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_every_byte_of_what_is_multiplied_in_bf16_comes_back(dtype, seed) -> None:
    codes = random_bytes(3, ROWS, COLUMNS).view(dtype)
    size = codes.shape[-1] // 128 * 128
    codes = codes[..., :size].contiguous()
    prepared = layout.prepare_codes(codes, "packed")
    assert prepared.shape == codes.shape
    assert prepared.dtype == dtype
    restored = layout.restore_codes(prepared, "packed")
    assert torch.equal(restored.view(torch.uint8), codes.view(torch.uint8))
    scale = random_bytes(3, ROWS, COLUMNS // 16).view(torch.float8_e4m3fn)
    back = layout.restore_scales(layout.prepare_scales(scale, "packed"), "packed")
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))
    with pytest.raises(ValueError, match="columns must be a multiple of 128"):
        layout.prepare_codes(codes[..., :-32], "packed")


def test_nvfp4_tiles_lie_as_blackwell_reads_them(seed) -> None:
    """Codes as those of FP4; scales in two atoms of 64 elements a block, by lane and row / 32."""
    codes = random_bytes(2, 256, COLUMNS // 2)
    prepared = layout.prepare_codes(codes, "tiled")
    as_fp4 = layout.prepare_codes(codes.view(torch.int8), "tiled").view(torch.uint8)
    assert torch.equal(prepared, as_fp4)
    assert torch.equal(layout.restore_codes(prepared, "tiled"), codes)
    scale = random_bytes(2, 256, COLUMNS // 16)
    tiled = layout.prepare_scales(scale.view(torch.float8_e4m3fn), "tiled")
    atoms = tiled.view(torch.uint8).view(2, 2, COLUMNS // 64, 32, 4, 4)
    for _ in range(300):
        place = tuple(int(torch.randint(n, ())) for n in atoms.shape)
        expert, tile, atom, lane, part, group = place
        assert atoms[place] == scale[expert, 128 * tile + 32 * part + lane, 4 * atom + group]
    back = layout.restore_scales(tiled, "tiled")
    assert torch.equal(back.view(torch.uint8), scale)
    with pytest.raises(ValueError, match="columns must be a multiple of 128, got 64"):
        layout.prepare_scales(torch.zeros(128, 4, dtype=torch.float8_e4m3fn), "tiled")
