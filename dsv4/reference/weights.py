"""Weight encodings of DeepSeek-V4 checkpoints: FP8 blocks, FP4 (MXFP4) rows, NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.quantize import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    ceil_log2,
    exp2_int,
    round_e2m1,
    round_e4m3,
)


def decode_e8m0(scale: Tensor) -> Tensor:
    """FP32 values of scale bytes (float8_e8m0fnu or uint8); FP32 scales pass through."""
    if scale.dtype == torch.float32:
        return scale
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"scale: expected float8_e8m0fnu, uint8 or float32, got {scale.dtype}")
    # Reinterpret, never convert: the byte 120 means 2^-7, not 120.
    byte = scale.view(torch.uint8)
    value = torch.ldexp(torch.ones_like(byte, dtype=torch.float32), byte.to(torch.int32) - 127)
    return torch.where(byte == 255, torch.nan, value)


def encode_e8m0(exponent: Tensor) -> Tensor:
    """float8_e8m0fnu of int32 exponents in -127..127."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _expand(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def block_exponents(weight: Tensor, block: tuple[int, int], largest: float) -> Tensor:
    """int32 [..., ceil(O / b0), ceil(I / b1)]: the least exponent whose scale fits each tile."""
    out, inner = weight.shape[-2:]
    pad = (0, -inner % block[1], 0, -out % block[0])
    tiles = torch.nn.functional.pad(weight.float().abs(), pad)
    tiles = tiles.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    amax = tiles.amax((-3, -1)).clamp(min=2.0**-100)
    return ceil_log2(amax * (1 / largest))


def encode_fp8(weight: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes of `weight` [..., O, I] and float8_e8m0fnu scales of its tiles."""
    exponent = block_exponents(weight, block, E4M3_MAX)
    codes = round_e4m3(weight.float() / _expand(exp2_int(exponent), weight.shape, block))
    return codes.to(torch.float8_e4m3fn), encode_e8m0(exponent)


def decode_fp8(codes: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """FP32 W[o, i] = e4m3[o, i] * scale[o // b0, i // b1]; scale e8m0 or FP32 (Base files)."""
    expected = tuple(-(-n // b) for n, b in zip(codes.shape[-2:], block))
    if tuple(scale.shape[-2:]) != expected:
        raise ValueError(f"scale: expected {expected} tiles of {block}, got {tuple(scale.shape)}")
    return codes.float() * _expand(decode_e8m0(scale), codes.shape, block)


def pack_e2m1(values: Tensor) -> Tensor:
    """int8 [..., K/2] of e2m1 values [..., K]: the even element sits in the low nibble."""
    table = torch.tensor(E2M1_VALUES, device=values.device)
    magnitude = (values.float().abs()[..., None] == table).to(torch.uint8)
    if not bool(magnitude.any(-1).all()):
        raise ValueError("values: expected e2m1 values (0, .5, 1, 1.5, 2, 3, 4, 6 and signs)")
    code = magnitude.argmax(-1) + 8 * torch.signbit(values)
    return (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8).view(torch.int8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """FP32 values [..., K] of packed bytes [..., K/2] (int8 or uint8)."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    byte = packed.view(torch.uint8).to(torch.int64)
    code = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    return table[code & 7] * torch.where(code >= 8, -1.0, 1.0)


def encode_fp4(weight: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """int8 [..., O, I/2] and float8_e8m0fnu scales [..., O, I/block] of `weight` [..., O, I]."""
    exponent = block_exponents(weight, (1, block), E2M1_MAX)
    values = round_e2m1(weight.float() / exp2_int(exponent).repeat_interleave(block, -1))
    return pack_e2m1(values), encode_e8m0(exponent)


def decode_fp4(packed: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """FP32 weight [..., O, I]: W[o, i] = e2m1 * 2^(s[o, i // block] - 127)."""
    values = unpack_e2m1(packed)
    if scale.shape[-1] * block != values.shape[-1]:
        raise ValueError(
            f"scale: expected {values.shape[-1] // block} groups of {block} a row, "
            f"got {scale.shape[-1]}"
        )
    return values * decode_e8m0(scale).repeat_interleave(block, -1)


def decode_nvfp4(packed: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """FP32 weight of an NVFP4 tensor: e2m1 * e4m3 scale per 16 inputs * FP32 tensor scale."""
    return (
        unpack_e2m1(packed)
        * weight_scale.float().repeat_interleave(16, -1)
        * weight_scale_2.float().reshape(
            *weight_scale_2.shape, *[1] * (packed.dim() - weight_scale_2.dim())
        )
    )


def fp4_to_fp8(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same weights as FP8 with 128 x 128 tiles, exactly; what `inference/convert.py` does.

    Args:
        packed: int8 [O, I/2]; O and I multiples of 128.
        scale: float8_e8m0fnu [O, I/32].

    Returns:
        float8_e4m3fn [O, I] and float8_e8m0fnu [O/128, I/128].

    Raises:
        ValueError: scales within a tile differ by more than 2^14, so that a value would be rounded.
    """
    exponent = scale.view(torch.uint8).to(torch.int32) - 127
    rows, groups = exponent.shape
    tiles = exponent.view(rows // 128, 128, groups // 4, 4)
    top = tiles.amax((1, 3))
    if int((top - tiles.amin((1, 3))).max()) > 14:
        raise ValueError(
            "scale: exponents within a 128 x 128 tile differ by more than 14; not lossless"
        )
    shift = (tiles - top[:, None, :, None] + 6).view(rows, groups).repeat_interleave(32, -1)
    codes = torch.ldexp(unpack_e2m1(packed), shift)
    return codes.to(torch.float8_e4m3fn), encode_e8m0(top - 6)


def fake_quantize_fp8(weight: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """What `encode_fp8` would store, as FP32, without gradient."""
    scale = _expand(exp2_int(block_exponents(weight, block, E4M3_MAX)), weight.shape, block)
    return round_e4m3(weight.float() / scale) * scale


def fake_quantize_fp4(weight: Tensor, block: int = 32) -> Tensor:
    """What `encode_fp4` would store, as FP32, without gradient."""
    scale = exp2_int(block_exponents(weight, (1, block), E2M1_MAX)).repeat_interleave(block, -1)
    return round_e2m1(weight.float() / scale) * scale
