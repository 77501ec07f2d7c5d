"""Caches of 584-byte entries (`dsv4.kernels.kit.kv_entry`) as FlashMLA's functions get them."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.quoting import quoted

HEAD_DIM = 512
ENTRY_BYTES = Fp8Entry(HEAD_DIM).bytes


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
            f"{name}: got shape {quoted(cache.shape)}, needs [pages, entries, 1, {ENTRY_BYTES}]"
        )
    if cache.stride(3) != 1 or (cache.shape[1] > 1 and cache.stride(1) != ENTRY_BYTES):
        got = quoted(cache.stride())
        raise ValueError(f"{name}: got strides {got}, each page must be contiguous")
