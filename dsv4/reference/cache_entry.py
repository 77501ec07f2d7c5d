"""The 584-byte KV cache entry of FlashMLA ("MODEL1", vLLM's `fp8_ds_mla`) and its pages.

A page of P entries holds first P records of 576 bytes (448 e4m3 values, 64 bf16 values), then P
records of 8 bytes (7 e8m0 scales, one per 64 e4m3 values, and a zero byte); its stride is padded to
a multiple of 576 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.quantize import ceil_log2, quantize_e4m3
from dsv4.reference.weights import decode_e8m0

NOPE_DIM = 448
ROPE_DIM = 64
GROUP = 64
DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = 8
ENTRY_BYTES = DATA_BYTES + SCALE_BYTES


def page_bytes(entries: int) -> int:
    """Stride in bytes of a page of so many entries."""
    return -(-entries * ENTRY_BYTES // DATA_BYTES) * DATA_BYTES


def pack_entries(kv: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 data [..., 576] and scale records [..., 8] of KV vectors [..., 512]."""
    if kv.shape[-1] != NOPE_DIM + ROPE_DIM:
        raise ValueError(f"kv: expected {NOPE_DIM + ROPE_DIM} channels, got {kv.shape[-1]}")
    values, scale = quantize_e4m3(kv[..., :NOPE_DIM], GROUP)
    nope = values.to(torch.float8_e4m3fn).view(torch.uint8)
    rope = kv[..., NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    exponent = (ceil_log2(scale) + 127).to(torch.uint8)
    return torch.cat((nope, rope), -1), torch.nn.functional.pad(exponent, (0, 1))


def unpack_entries(data: Tensor, scales: Tensor) -> Tensor:
    """bf16 KV vectors [..., 512] of data [..., 576] and scale records [..., 8]."""
    nope = data[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    nope = nope * decode_e8m0(scales[..., :7].contiguous()).repeat_interleave(GROUP, -1)
    rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16)
    return torch.cat((nope.to(torch.bfloat16), rope), -1)


def pack_pages(kv: Tensor) -> Tensor:
    """uint8 pages [pages, page_bytes(P)] of KV vectors [pages, P, 512]; padding bytes are zero."""
    pages, entries = kv.shape[:2]
    data, scales = pack_entries(kv)
    out = torch.zeros(pages, page_bytes(entries), dtype=torch.uint8, device=kv.device)
    out[:, : DATA_BYTES * entries] = data.flatten(1)
    out[:, DATA_BYTES * entries : ENTRY_BYTES * entries] = scales.flatten(1)
    return out


def unpack_pages(pages: Tensor, entries: int) -> Tensor:
    """bf16 KV vectors [pages, entries, 512] of uint8 pages [pages, page_bytes(entries)]."""
    if pages.shape[1] != page_bytes(entries):
        raise ValueError(
            f"pages: expected a stride of {page_bytes(entries)} bytes for {entries} entries, "
            f"got {pages.shape[1]}"
        )
    data = pages[:, : DATA_BYTES * entries].unflatten(1, (entries, DATA_BYTES))
    scales = pages[:, DATA_BYTES * entries : ENTRY_BYTES * entries]
    return unpack_entries(data, scales.unflatten(1, (entries, SCALE_BYTES)))
