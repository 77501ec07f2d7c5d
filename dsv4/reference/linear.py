"""Linear layers, with quantised weights and inputs or plain."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.quantize import quantize_e4m3
from dsv4.reference.weights import decode_e8m0, decode_fp8


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None = None, block: int = 128
) -> Tensor:
    """y = x W^T with sums in FP64, of the quantised input.

    Args:
        x: [..., K], quantised here with one power-of-two scale per `block`; or codes of e4m3.
        weight: [M, K] codes of e4m3.
        scale: [ceil(M / block), K / block] e8m0 or FP32.
        x_scale: [..., K / block] e8m0, of codes.

    Returns:
        [..., M] FP64.
    """
    if x_scale is None:
        values, scales = quantize_e4m3(x, block)
    else:
        values, scales = x.float(), decode_e8m0(x_scale)
    rounded = values.double() * scales.double().repeat_interleave(block, -1)
    return torch.matmul(rounded, decode_fp8(weight, scale, (block, block)).double().mT)


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T with sums in FP64.

    Args:
        x: [..., K].
        weight: [M, K].

    Returns:
        [..., M] FP64.
    """
    return torch.matmul(x.double(), weight.double().mT)


def grouped_linear(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int, block: int = 128, rounds: bool = False
) -> Tensor:
    """y = x W^T of each group with sums in FP64.

    Args:
        x: [..., groups * K].
        weight: [groups * M, K] codes of e4m3.
        scale: [groups * M / block, K / block] e8m0 or FP32.
        rounds: whether x is quantised, with one power-of-two scale per `block`.

    Returns:
        [..., groups * M] FP64.
    """
    values = x.double()
    if rounds:
        codes, scales = quantize_e4m3(x, block)
        values = codes.double() * scales.double().repeat_interleave(block, -1)
    dense = decode_fp8(weight, scale, (block, block)).double().unflatten(0, (groups, -1))
    parts = values.unflatten(-1, (groups, -1))
    return torch.einsum("...gk,gmk->...gm", parts, dense).flatten(-2)


def rotated_heads(y: Tensor, heads: int, rope: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Heads with the last channels turned, and the mean of each one's squares before.

    Args:
        y: [T, heads * d], FP64 or as it was rounded.
        rope: [R, r] cosines, then sines, per position.
        positions: [T] integers, clamped to 0..R - 1.

    Returns:
        [T, heads * d] and [T, heads] FP64.
    """
    wide = y.double().unflatten(-1, (heads, -1))
    cos, sin = rope[positions.long().clamp(0, len(rope) - 1)].double().unsqueeze(1).chunk(2, -1)
    plain, tail = wide[..., : wide.shape[-1] - rope.shape[1]], wide[..., -rope.shape[1] :]
    even, odd = tail[..., ::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((plain, turned), -1).flatten(-2), wide.square().mean(-1)
