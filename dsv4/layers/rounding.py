"""Rounding of index queries and keys to what the quantised caches of training could hold.

Applied exactly when the checkpoint declares a quantisation (official inference/kernel.py).
"""

from __future__ import annotations

from torch import Tensor

from dsv4.ops.quantize import hadamard, qdq_e2m1

INDEX_BLOCK = 32


def round_index(x: Tensor) -> Tensor:
    """Hadamard-transform index queries or keys [..., index_head_dim], round to FP4 per 32."""
    return qdq_e2m1(hadamard(x), INDEX_BLOCK)
