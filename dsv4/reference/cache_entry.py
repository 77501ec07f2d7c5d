"""The KV cache entry of FlashMLA ("MODEL1", vLLM's `fp8_ds_mla`) and its pages, for any head_dim.

An entry of d channels, the last 64 of them rotated, is d - 64 e4m3 values and 64 bf16 values, and a
record of e8m0 scales, one per 64 e4m3 values, filled with zeros to a multiple of 8 bytes. With 512
channels that is 576 + 8 bytes. A page of P entries holds first P records of values, then P records
of scales; its stride is padded to a multiple of the former, 576 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.quantize import ceil_log2, quantize_e4m3, round_e4m3
from dsv4.reference.weights import decode_e8m0

HEAD_DIM = 512
ROPE_DIM = 64
GROUP = 64


def data_bytes(dim: int = HEAD_DIM, rope_dim: int = ROPE_DIM) -> int:
    """Bytes of an entry's values."""
    return dim + rope_dim


def scale_bytes(dim: int = HEAD_DIM, rope_dim: int = ROPE_DIM) -> int:
    """Bytes of an entry's scales."""
    return -(-(dim - rope_dim) // (8 * GROUP)) * 8


def entry_bytes(dim: int = HEAD_DIM, rope_dim: int = ROPE_DIM) -> int:
    """Bytes of an entry: 584 of 512 channels."""
    return data_bytes(dim, rope_dim) + scale_bytes(dim, rope_dim)


def page_bytes(entries: int, dim: int = HEAD_DIM, rope_dim: int = ROPE_DIM) -> int:
    """Stride in bytes of a page of so many entries."""
    unit = data_bytes(dim, rope_dim)
    return -(-entries * entry_bytes(dim, rope_dim) // unit) * unit


def pack_entries(
    kv: Tensor, rope_dim: int = ROPE_DIM, *, uniform_scale: bool = False
) -> tuple[Tensor, Tensor]:
    """uint8 values [..., d + rope_dim] and scale records of KV vectors [..., d].

    With `uniform_scale` all groups of an entry have the largest of their scales.
    """
    plain = kv.shape[-1] - rope_dim
    if plain < 0 or plain % GROUP:
        raise ValueError(f"kv: expected {GROUP} n + {rope_dim} channels, got {kv.shape[-1]}")
    if plain:
        values, scale = quantize_e4m3(kv[..., :plain], GROUP)
        if uniform_scale:
            scale = scale.amax(-1, keepdim=True).expand_as(scale)
            values = round_e4m3(kv[..., :plain].float() / scale.repeat_interleave(GROUP, -1))
        exponent = (ceil_log2(scale) + 127).to(torch.uint8)
    else:
        values, exponent = kv[..., :0], kv[..., :0].to(torch.uint8)
    nope = values.to(torch.float8_e4m3fn).view(torch.uint8)
    rope = kv[..., plain:].to(torch.bfloat16).contiguous().view(torch.uint8)
    padding = scale_bytes(kv.shape[-1], rope_dim) - exponent.shape[-1]
    return torch.cat((nope, rope), -1), torch.nn.functional.pad(exponent, (0, padding))


def unpack_entries(
    data: Tensor, scales: Tensor, dim: int = HEAD_DIM, rope_dim: int = ROPE_DIM
) -> Tensor:
    """bf16 KV vectors [..., d] of values [..., d + rope_dim] and scale records."""
    plain = dim - rope_dim
    nope = data[..., :plain].contiguous().view(torch.float8_e4m3fn).float()
    factors = decode_e8m0(scales[..., : plain // GROUP].contiguous())
    nope = nope * factors.repeat_interleave(GROUP, -1)
    rope = data[..., plain:].contiguous().view(torch.bfloat16)
    return torch.cat((nope.to(torch.bfloat16), rope), -1)


def pack_pages(kv: Tensor, rope_dim: int = ROPE_DIM, *, uniform_scale: bool = False) -> Tensor:
    """uint8 pages [pages, page_bytes(P)] of KV vectors [pages, P, d]; padding bytes are zero."""
    pages, entries, dim = kv.shape
    data, scales = pack_entries(kv, rope_dim, uniform_scale=uniform_scale)
    stride = page_bytes(entries, dim, rope_dim)
    out = torch.zeros(pages, stride, dtype=torch.uint8, device=kv.device)
    middle, end = data[0].numel(), data[0].numel() + scales[0].numel()
    out[:, :middle] = data.flatten(1)
    out[:, middle:end] = scales.flatten(1)
    return out


def unpack_pages(
    pages: Tensor, entries: int, dim: int = HEAD_DIM, rope_dim: int = ROPE_DIM
) -> Tensor:
    """bf16 KV vectors [pages, entries, d] of uint8 pages [pages, bytes of the entries or more]."""
    needed = entries * entry_bytes(dim, rope_dim)
    if pages.shape[1] < needed:
        raise ValueError(
            f"pages: expected at least {needed} bytes for {entries} entries, got {pages.shape[1]}"
        )
    middle = entries * data_bytes(dim, rope_dim)
    data = pages[:, :middle].unflatten(1, (entries, -1))
    scales = pages[:, middle:needed].reshape(len(pages), entries, scale_bytes(dim, rope_dim))
    return unpack_entries(data, scales, dim, rope_dim)
