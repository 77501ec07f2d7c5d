"""Rotary position embedding: interleaved pairs of the last channels, YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def frequencies(
    dim: int,
    theta: float,
    scaling: Any | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """FP32 angular frequencies [dim / 2].

    Args:
        dim: number of rotated channels.
        theta: base; f_i = theta^(-2i / dim).
        scaling: None, or YaRN parameters with attributes `factor`,
            `original_max_position_embeddings`, `beta_fast` and `beta_slow`. Slow channels are
            divided by `factor`, fast ones kept; no magnitude scale.
    """
    f = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if scaling is None:
        return f.float()

    def channel(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(channel(scaling.beta_fast)), 0)
    high = min(math.ceil(channel(scaling.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float64, device=device)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (f * (1 - ramp) + f / scaling.factor * ramp).float()


def rotate(x: Tensor, positions: Tensor, freqs: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * len(freqs) channels of x by position * frequency.

    Args:
        x: [..., D], FP32.
        positions: integer, broadcastable to x.shape[:-1].
        freqs: [R / 2]; pair i is (x[D - R + 2i], x[D - R + 2i + 1]).
        inverse: rotate by the negative angle.
    """
    dim = 2 * freqs.numel()
    angle = positions[..., None].float() * freqs
    cos, sin = angle.cos(), angle.sin() * (-1 if inverse else 1)
    even, odd = x[..., -dim::2], x[..., x.shape[-1] - dim + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-dim], turned), -1)
