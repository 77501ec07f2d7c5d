"""The quantisers against brute force over every code, and against torch's own dtypes."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops.quantize import (
    E2M1_VALUES,
    dequantize_e2m1,
    dequantize_e4m3_blocks,
    hadamard,
    pack_e2m1,
    qdq_e2m1,
    qdq_e4m3,
    qdq_nvfp4,
    quantize_e2m1,
    quantize_e4m3,
    quantize_nvfp4,
    unpack_e2m1,
)
from dsv4.reference import quantize as reference

pytestmark = [pytest.mark.stage("op"), pytest.mark.stage("projections")]

# Every finite e4m3 value from 0 up in code order, decoded by hand: 4 exponent bits, bias 7, and 3
# mantissa bits.
E4M3_VALUES = [
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)
][:-1]


def nearest(x: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Brute force: the closest value, of two equally close ones that with the even code."""
    table = torch.tensor(values, dtype=torch.float64)
    distance = (x.abs().double()[..., None] - table).abs()
    best = distance.amin(-1, keepdim=True)
    even_first = torch.arange(len(values)) % 2
    code = torch.where(distance == best, even_first, 2).argmin(-1)
    return torch.copysign(table[code], x.double()).float()


def probes(values: list[float], seed: int) -> torch.Tensor:
    """Every value, every midpoint, their neighbours in float32, random ones; both signs."""
    table = torch.tensor(values)
    exact = torch.cat((table, (table[1:] + table[:-1]) / 2))
    near = [torch.nextafter(exact, torch.tensor(limit)) for limit in (torch.inf, -torch.inf)]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(4096, generator=generator) * table[-1]
    x = torch.cat((exact, *near, noise)).clamp(0, table[-1])
    return torch.cat((x, -x))


def with_amax(x: torch.Tensor, amax: float, block: int) -> torch.Tensor:
    """Blocks of x, each led by `amax`, so that the scale of every block is known."""
    pad = -x.numel() % (block - 1)
    rows = torch.cat((x, x.new_zeros(pad))).view(-1, block - 1)
    return torch.cat((torch.full((len(rows), 1), amax), rows), 1)


@pytest.mark.parametrize("exponent", [-13, -1, 0, 5])
def test_e4m3_is_nearest_even(exponent: int, seed: int) -> None:
    assert torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() == E4M3_VALUES
    x = with_amax(probes(E4M3_VALUES, seed), 448.0, 64)
    expected = nearest(x, E4M3_VALUES) * 2.0**exponent
    assert torch.equal(qdq_e4m3(x * 2.0**exponent, 64), expected)


@pytest.mark.parametrize("exponent", [-100, -1, 0, 5])
def test_e2m1_is_nearest_even(exponent: int, seed: int) -> None:
    x = with_amax(probes(list(E2M1_VALUES), seed), 6.0, 32)
    expected = nearest(x, list(E2M1_VALUES)) * 2.0**exponent
    assert torch.equal(qdq_e2m1(x * 2.0**exponent, 32), expected)


@pytest.mark.parametrize("exponent", range(-20, 20))
@pytest.mark.parametrize(("largest", "quantize"), [(448.0, quantize_e4m3), (6.0, quantize_e2m1)])
def test_scale_rounds_up_to_a_power_of_two(largest: float, quantize, exponent: int) -> None:
    """An amax of exactly largest * 2^k gives 2^k, the next float above gives 2^(k + 1)."""
    if largest * 2.0**exponent < 1e-4:
        pytest.skip("below the floor of e4m3")
    x = torch.zeros(2, 64)
    x[0, 0] = largest * 2.0**exponent
    # The product with the rounded 1 / largest absorbs a last place: two steps are surely above.
    above = x[0, 0].nextafter(torch.tensor(torch.inf)).nextafter(torch.tensor(torch.inf))
    x[1, 0] = above
    scale = quantize(x, 64)[1].float()
    assert scale.tolist() == [[2.0**exponent], [2.0 ** (exponent + 1)]]


def test_zero_blocks_have_floor_scales() -> None:
    x = torch.zeros(1, 128)
    codes, scale = quantize_e4m3(x, 128)
    assert (codes.float() == 0).all()
    assert scale.float().item() == 2.0**-22  # 1e-4 / 448 rounded up
    assert quantize_e2m1(x, 32)[1].float().unique().item() == 2.0**-126
    assert torch.equal(qdq_e2m1(x, 32), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_reference(dtype: torch.dtype, seed: int) -> None:
    """Wide-range data, bit for bit; codes and scales rebuild the fake-quantised values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 256, generator=generator)
    x = (x * torch.exp2(torch.randint(-30, 30, (3, 5, 256), generator=generator))).to(dtype)
    for block in (64, 128):
        expected = reference.fake_quantize_e4m3(x.float(), block)
        assert torch.equal(qdq_e4m3(x, block), expected.to(dtype))
        codes, scale = quantize_e4m3(x, block)
        assert scale.shape == (3, 5, 256 // block)
        decoded = codes.float() * scale.float().repeat_interleave(block, -1)
        assert torch.equal(decoded, expected)
    expected = reference.fake_quantize_e2m1(x.float(), 32)
    assert torch.equal(qdq_e2m1(x, 32), expected.to(dtype))
    packed, scale = quantize_e2m1(x, 32)
    assert (packed.dtype, packed.shape) == (torch.int8, (3, 5, 128))
    assert torch.equal(dequantize_e2m1(packed, scale, torch.float32), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    """A NaN or Inf must not turn into an innocent number."""
    x = torch.ones(2, 64)
    x[0, 3] = value
    for result in (qdq_e4m3(x, 64), qdq_e2m1(x, 32)):
        assert not result[0, 3].isfinite()
        assert torch.equal(result[1], torch.ones(64))


def test_nibbles() -> None:
    """All 256 bytes: low nibble first, code 8 is -0, the sign of a byte does not leak."""
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    codes = unpack_e2m1(packed)
    assert codes.tolist() == [n for b in range(256) for n in (b & 15, b >> 4)]
    assert torch.equal(pack_e2m1(codes), packed)
    values = dequantize_e2m1(packed.view(16, 16), torch.ones(16, 1), torch.float32).flatten()
    table = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert values.tolist() == [table[code] for code in codes.tolist()]
    assert torch.equal(torch.signbit(values), codes >= 8)


def test_nvfp4_groups() -> None:
    """Groups of 16 with e4m3 scales, as NVFP4 experts have them."""
    packed = torch.full((2, 16), 0x22, dtype=torch.uint8)  # every element 1.0
    scale = torch.tensor([[1.5, 448.0], [0.25, 3.0]]).to(torch.float8_e4m3fn)
    expected = scale.float().repeat_interleave(16, -1)
    assert torch.equal(dequantize_e2m1(packed, scale, torch.float32), expected)


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (3, 128, 1), (1, 1)])
@pytest.mark.parametrize("kind", [torch.float8_e8m0fnu, torch.float32])
def test_weight_blocks(shape: tuple[int, ...], kind: torch.dtype, seed: int) -> None:
    """W[o, i] = e4m3[o, i] * scale[o // 128, i // 128], ragged last blocks included."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    *batch, rows, columns = shape
    exponents = torch.randint(
        -6, 6, (*batch, -(-rows // 128), -(-columns // 128)), generator=generator
    )
    scale = torch.exp2(exponents.float()).to(kind)
    row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
    expected = weight.float() * scale.float()[..., row[:, None], column]
    assert torch.equal(dequantize_e4m3_blocks(weight, scale, dtype=torch.float32), expected)
    assert torch.equal(dequantize_e4m3_blocks(weight, scale), expected.bfloat16())


def test_hadamard(seed: int) -> None:
    """The Sylvester matrix over sqrt(n); its own inverse; the dtype stays."""
    matrix = torch.ones(1, 1)
    while len(matrix) < 128:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(4, 3, 128, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(hadamard(x), x @ matrix / 128**0.5)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    assert hadamard(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(hadamard(x[..., :1]), x[..., :1])


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"x: .* multiple of block 128, got shape \(2, 130\)"):
        qdq_e4m3(torch.zeros(2, 130), 128)
    with pytest.raises(ValueError, match=r"scale: got shape \(1, 1\).* needs \(2, 1\)"):
        dequantize_e4m3_blocks(torch.zeros(130, 8), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"scale: got shape \(1, 3\).* divide the 8 elements"):
        dequantize_e2m1(torch.zeros(1, 4, dtype=torch.int8), torch.ones(1, 3))
    with pytest.raises(ValueError, match="codes: needs an even last dimension"):
        pack_e2m1(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="power of two"):
        hadamard(torch.zeros(2, 96))


@pytest.mark.parametrize("whole", [2.0**-9, 0.0371])
def test_nvfp4_is_that_of_the_reference(whole: float, seed: int) -> None:
    """Blocks of every magnitude: below the scales, subnormal ones, above the largest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 40, 64, generator=generator)
    x *= torch.exp2(torch.linspace(-24, 16, 40))[:, None] * whole
    x[0, 5] = 0
    scales = torch.tensor([whole, 2 * whole, whole / 3])[:, None]
    codes, scale = quantize_nvfp4(x, scales)
    values, wanted = reference.quantize_nvfp4(x, scales)
    # Divided by six times the scale there, multiplied with the inverse here: ties.
    same = scale.float() == wanted
    assert same.float().mean() > 0.99
    found = dequantize_e2m1(codes, torch.ones_like(scale), torch.float32).unflatten(-1, (-1, 16))
    equal = (found == values.unflatten(-1, (-1, 16))) | ~same[..., None]
    assert equal.float().mean() > 0.999
    whole_values = dequantize_e2m1(codes, scale, torch.float32) * scales[..., None]
    assert torch.allclose(qdq_nvfp4(x, scales), whole_values, rtol=1e-6, atol=0)
    assert (scale.float() == 448).any() and (scale.float() == 0).any()
    assert (scale.float()[scale.float() > 0] < 2.0**-6).any()


def test_nvfp4_by_hand() -> None:
    """amax 12 in units of 6 x 0.25: scale 8, a step of 2."""
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([12.0, -3.0, 5.0, 7.0])
    codes, scale = quantize_nvfp4(x, torch.tensor([0.25]))
    assert scale.float().tolist() == [[8.0]]
    # 6, -1.5, 2.5 and 3.5, whose neighbours 2 and 4 have even codes.
    assert unpack_e2m1(codes)[0, :4].tolist() == [7, 11, 4, 6]
    assert qdq_nvfp4(x, torch.tensor([0.25]))[0, :4].tolist() == [12.0, -3.0, 4.0, 8.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_nvfp4_block_that_is_not_finite_is_lost_alone(value: float) -> None:
    x = torch.ones(1, 48)
    x[0, 20] = value
    scale = quantize_nvfp4(x, torch.tensor([0.01]))[1]
    assert scale.isnan().tolist() == [[False, True, False]]
    found = qdq_nvfp4(x, torch.tensor([0.01])).isnan()
    assert found[0, 16:32].all() and not found[0, :16].any() and not found[0, 32:].any()
