"""Top-k with a defined order among ties."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.quoting import quoted

_INVALID = -(2**31)  # below the image of -inf


def topk_stable(scores: Tensor, k: int, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the k best: higher score first, among equal scores the lower index first.

    -0.0 equals 0.0. An invalid entry is never chosen before a valid one, whatever its score.
    Does not synchronise.

    Args:
        scores: [..., N] float32, no NaN among valid entries.
        k: number of entries, may exceed N.
        valid: [..., N] bool.

    Returns:
        indices: [..., k] int64, best first. Only the first `count` mean something; the others
            point at invalid entries, or at 0 past N.
        count: [...] int64, min(k, number of valid entries).
    """
    if scores.dtype != torch.float32:
        raise TypeError(f"scores: needs torch.float32, got {scores.dtype}")
    if valid.dtype != torch.bool or valid.shape != scores.shape:
        raise ValueError(
            f"valid: needs torch.bool of shape {quoted(scores.shape)}, "
            f"got {valid.dtype} of shape {quoted(valid.shape)}"
        )
    size = scores.shape[-1]
    # Adding 0.0 turns -0.0 into 0.0; then flipping the magnitude of negatives makes the bits of
    # a float sort as a signed integer.
    bits = (scores + 0.0).view(torch.int32)
    order = torch.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), _INVALID)
    falling = torch.arange(size - 1, -1, -1, device=scores.device)
    keys = (order.long() << 32) | falling
    indices = keys.topk(min(k, size), dim=-1).indices
    if k > size:
        indices = torch.nn.functional.pad(indices, (0, k - size))
    return indices, valid.sum(-1).clamp(max=k)
