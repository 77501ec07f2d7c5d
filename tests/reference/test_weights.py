"""Weight encodings: bytes by hand, round trips, and the lossless FP4 to FP8 conversion."""

from __future__ import annotations

import pytest
import torch

from dsv4.reference import weights as w

pytestmark = pytest.mark.stage("reference")


def test_nibble_order_and_codes_by_hand() -> None:
    packed = torch.tensor([[0x21, -0x80 + 0x0F, 0x7C]], dtype=torch.int8)
    assert w.unpack_e2m1(packed).tolist() == [[0.5, 1.0, -6.0, -0.0, -2.0, 6.0]]
    assert torch.equal(w.pack_e2m1(w.unpack_e2m1(packed)), packed), "the sign of -0 is kept"


def test_every_fp4_byte_round_trips() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None]
    assert torch.equal(w.pack_e2m1(w.unpack_e2m1(every)), every)
    with pytest.raises(ValueError, match="e2m1 values"):
        w.pack_e2m1(torch.tensor([0.5, 0.7]))


def test_e8m0_bytes_are_reinterpreted_never_converted() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    value = w.decode_e8m0(byte)
    assert value[120] == 2.0**-7 and value[127] == 1 and value[0] == 2.0**-127
    assert value[255].isnan()
    assert torch.equal(value[1:255], torch.exp2(torch.arange(1, 255).double() - 127).float())
    assert torch.equal(w.decode_e8m0(byte.view(torch.float8_e8m0fnu))[:255], value[:255])
    with pytest.raises(TypeError, match="int8"):
        w.decode_e8m0(byte.view(torch.int8))


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (3, 128, 256)])
def test_fp8_blocks_round_trip_within_half_a_step(shape: tuple[int, ...], seed: int) -> None:
    weight = torch.randn(shape) * torch.exp2(torch.randint(-6, 6, (shape[-2], 1)).float())
    codes, scale = w.encode_fp8(weight)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    decoded = w.decode_fp8(codes, scale)
    spread = w.decode_e8m0(scale).repeat_interleave(128, -2).repeat_interleave(128, -1)
    spread = spread[..., : shape[-2], : shape[-1]]
    assert ((decoded - weight).abs() <= (weight.abs() / 16).maximum(spread * 2.0**-10)).all()
    assert torch.equal(decoded, w.fake_quantize_fp8(weight))
    by_hand = codes[..., -1, -1].float() * w.decode_e8m0(scale)[..., -1, -1]
    assert torch.equal(decoded[..., -1, -1], by_hand)
    with pytest.raises(ValueError, match="scale: expected"):
        w.decode_fp8(codes, scale[..., :-1])


def test_fp4_rows_round_trip(seed: int) -> None:
    weight = torch.randn(4, 96, 64) * 0.02
    packed, scale = w.encode_fp4(weight)
    assert packed.dtype == torch.int8 and packed.shape == (4, 96, 32)
    assert scale.dtype == torch.float8_e8m0fnu and scale.shape == (4, 96, 2)
    decoded = w.decode_fp4(packed, scale)
    assert torch.equal(decoded, w.fake_quantize_fp4(weight))
    again = w.encode_fp4(decoded)
    assert torch.equal(w.decode_fp4(*again), decoded)
    assert (decoded - weight).norm() < 0.2 * weight.norm()


def test_fp4_to_fp8_is_lossless_or_refused(seed: int) -> None:
    exponent = torch.randint(-12, 3, (256, 8), dtype=torch.int32)
    packed = torch.randint(-128, 128, (256, 128), dtype=torch.int8)
    codes, scale = w.fp4_to_fp8(packed, w.encode_e8m0(exponent))
    expected = w.decode_fp4(packed, w.encode_e8m0(exponent))
    assert torch.equal(w.decode_fp8(codes, scale), expected)
    exponent[5, 1], exponent[90, 2] = 9, -6
    with pytest.raises(ValueError, match="not lossless"):
        w.fp4_to_fp8(packed, w.encode_e8m0(exponent))


def test_nvfp4_by_hand(seed: int) -> None:
    packed = torch.randint(-128, 128, (3, 16), dtype=torch.int8)
    scale = torch.rand(3, 2).mul(4).to(torch.float8_e4m3fn)
    globally = torch.tensor(0.0137)
    decoded = w.decode_nvfp4(packed, scale, globally)
    values = w.unpack_e2m1(packed)
    for row, column in ((0, 0), (1, 15), (2, 16), (2, 31)):
        expected = values[row, column] * scale[row, column // 16].float() * globally
        assert torch.equal(decoded[row, column], expected)
    stacked = w.decode_nvfp4(packed.expand(2, 3, 16), scale.expand(2, 3, 2), torch.tensor([1.0, 2]))
    assert torch.equal(stacked[1], 2 * stacked[0])
