"""Other packages' attention on the same queries, keys and values, each in its default accuracy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], Tensor]  # out [B, Hq, L, d]
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        name: heading of its column.
        prepare: q, k, v [B, H, L, d] and whether attention is causal -> the call, with everything
            done that is not attention.
    """

    name: str
    prepare: Callable[[Tensor, Tensor, Tensor, bool], Call]


def peers() -> Iterator[Peer]:
    """Those of this installation: torch's, and FlashAttention 3 and SageAttention where they can be
    imported."""
    yield Peer("SDPA flash", partial(_sdpa, SDPBackend.FLASH_ATTENTION))
    yield Peer("SDPA cuDNN", partial(_sdpa, SDPBackend.CUDNN_ATTENTION))
    flash = _module("flash_attn_interface")
    if flash is not None:
        yield Peer("FA3", partial(_flash, flash, False))
        yield Peer("FA3 FP8", partial(_flash, flash, True))
    sage = _module("sageattention")
    if sage is not None:
        yield Peer("SageAttention, end to end", partial(_sage, sage))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def _flash(flash: Any, is_fp8: bool, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    scales: dict[str, Tensor] = {}
    if is_fp8:
        coded = {}
        for name, x in (("q", q), ("k", k), ("v", v)):
            # A scale for each sequence and head of keys.
            group = x.unflatten(2, (k.shape[2], -1)).abs().amax((1, 3, 4)).float() / E4M3_MAX
            spread = group.repeat_interleave(x.shape[2] // k.shape[2], 1)[:, None, :, None]
            coded[name] = (x / spread).to(torch.float8_e4m3fn)
            scales[f"{name}_descale"] = group
        q, k, v = coded.values()

    def call() -> Tensor:
        out = flash.flash_attn_func(q, k, v, causal=is_causal, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _sage(sage: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    return lambda: sage.sageattn(q, k, v, is_causal=is_causal)
