"""Rounding of cached values to what the quantised caches of training could hold.

Applied exactly when the checkpoint declares a quantisation (official inference/kernel.py).
"""

from __future__ import annotations

from torch import Tensor

from dsv4.ops.quantize import hadamard, qdq_e2m1, qdq_e4m3

KV_BLOCK = 64
INDEX_BLOCK = 32


def round_kv_(kv: Tensor, rope_dim: int) -> Tensor:
    """Round keys [..., head_dim] to FP8 per 64 channels, in place; the rotated ones stay exact."""
    plain = kv[..., :-rope_dim]
    plain.copy_(qdq_e4m3(plain, KV_BLOCK))
    return kv


def round_index(x: Tensor) -> Tensor:
    """Hadamard-transform index queries or keys [..., index_head_dim], round to FP4 per 32."""
    return qdq_e2m1(hadamard(x), INDEX_BLOCK)
