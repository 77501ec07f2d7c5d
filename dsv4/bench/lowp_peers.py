"""Other packages' attention on the same queries, keys and values, each in its default accuracy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv4.bench.lowp_libraries import by_group, cudnn_fp8, flash3, sage_kernel

Call = Callable[[], Tensor]  # out [B, Hq, L, d]


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


def peers(fa3: Path | None = None, sage: Path | None = None) -> Iterator[Peer]:
    """Those of this installation: torch's, and FlashAttention 3, cuDNN's FP8 attention and
    SageAttention where they can be imported.

    Args:
        fa3: FlashAttention 3 of vLLM's wheel, `_vllm_fa3_C.abi3.so`.
        sage: SageAttention's kernel, of `scripts/sage_parity library`.
    """
    yield Peer("SDPA flash", partial(_sdpa, SDPBackend.FLASH_ATTENTION))
    yield Peer("SDPA cuDNN", partial(_sdpa, SDPBackend.CUDNN_ATTENTION))
    if _module("cudnn") is not None:
        yield Peer("cuDNN FP8", cudnn_fp8)
    flash = None if fa3 else _module("flash_attn_interface")
    if fa3 is not None:
        yield Peer("FA3", partial(flash3, fa3, False))
        yield Peer("FA3 FP8", partial(flash3, fa3, True))
    if flash is not None:
        yield Peer("FA3", partial(_flash, flash, False))
        yield Peer("FA3 FP8", partial(_flash, flash, True))
    if sage is not None:
        yield Peer("SageAttention", partial(sage_kernel, sage))
    package = _module("sageattention")
    if package is not None:
        yield Peer("SageAttention, end to end", partial(_sage, package))


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
    scales: dict[str, Tensor] = {}
    if is_fp8:
        (q, of_q), (k, of_k), (v, of_v) = (by_group(x, k.shape[1]) for x in (q, k, v))
        scales = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_v}
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def call() -> Tensor:
        out = flash.flash_attn_func(q, k, v, causal=is_causal, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _sage(sage: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    return lambda: sage.sageattn(q, k, v, is_causal=is_causal)
