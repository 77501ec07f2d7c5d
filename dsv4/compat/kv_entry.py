"""Reading FlashMLA's 584-byte KV cache entries (FlashMLA "MODEL1", vLLM `fp8_ds_mla`).

A page of P entries holds P records of 576 bytes (448 e4m3 values, then 64 bf16 values that carry
the rotation), then P records of 8 bytes (one E8M0 scale per 64 e4m3 values, and a byte of padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.runtime.checks import check_is_tensor

HEAD_DIM = 512
NOPE_DIM = 448
GROUP = 64
GROUPS = NOPE_DIM // GROUP
DATA_BYTES = NOPE_DIM + 2 * (HEAD_DIM - NOPE_DIM)
SCALE_BYTES = 8
ENTRY_BYTES = DATA_BYTES + SCALE_BYTES


def check_cache(name: str, cache: Tensor, device: torch.device) -> None:
    """Refuse, by the name of the argument, a cache that is not [pages, P, 1, 584] packed entries.

    Raises:
        ValueError, TypeError: the cache has another layout, no page, or is on another device.
    """
    check_is_tensor(name, cache)
    if cache.device != device:
        raise ValueError(f"{name}: got a tensor on {cache.device}, q is on {device}")
    if cache.dtype.itemsize != 1:
        raise TypeError(f"{name}: got {cache.dtype}, needs a one-byte dtype (packed FP8 entries)")
    if cache.dim() != 4 or cache.shape[2:] != (1, ENTRY_BYTES) or cache.numel() == 0:
        raise ValueError(
            f"{name}: got shape {tuple(cache.shape)}, needs [pages, entries, 1, {ENTRY_BYTES}]"
        )
    if cache.stride(3) != 1 or (cache.shape[1] > 1 and cache.stride(1) != ENTRY_BYTES):
        raise ValueError(f"{name}: got strides {cache.stride()}, each page must be contiguous")


def gather_entries(cache: Tensor, rows: Tensor) -> Tensor:
    """Decode chosen cache entries; exact, since e4m3 times a power of two fits bf16.

    Args:
        cache: [pages, P, 1, 584] of a one-byte dtype, each page contiguous, any stride between
            pages.
        rows: [...] int64, page * P + entry, each within the cache.

    Returns:
        [..., 512] bfloat16.
    """
    pages, entries = cache.shape[:2]
    data, scales = (
        cache.view(torch.uint8)
        .view(pages, entries * ENTRY_BYTES)
        .split((entries * DATA_BYTES, entries * SCALE_BYTES), 1)
    )
    page, entry = rows // entries, rows % entries
    record = data.unflatten(1, (entries, DATA_BYTES))[page, entry]
    scale = scales.unflatten(1, (entries, SCALE_BYTES))[page, entry][..., :GROUPS]
    nope = record[..., :NOPE_DIM].view(torch.float8_e4m3fn).float().unflatten(-1, (GROUPS, GROUP))
    nope = nope * scale.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    rope = record[..., NOPE_DIM:].view(torch.bfloat16)
    return torch.cat((nope.flatten(-2).to(torch.bfloat16), rope), -1)
