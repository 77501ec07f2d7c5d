"""The normalised Walsh-Hadamard transform of indexer queries and keys, before they become FP4."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_matrix(size: int, device: torch.device | None = None) -> Tensor:
    """FP32 [size, size] with entries +-1 in natural (Sylvester) order; `size` a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"size: expected a power of two, got {size}")
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        top = torch.cat((matrix, matrix), 1)
        matrix = torch.cat((top, torch.cat((matrix, -matrix), 1)), 0)
    return matrix


def hadamard(x: Tensor) -> Tensor:
    """x [..., n] transformed along the last dimension, scaled by n^-0.5; its own inverse. FP32."""
    size = x.shape[-1]
    return x.float() @ hadamard_matrix(size, x.device) * size**-0.5
