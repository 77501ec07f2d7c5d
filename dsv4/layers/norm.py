"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.layers.module import Module, empty_parameter


def rms_normalize(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return x / rms(x) [* weight] over the last dimension, computed in fp32, rounded once.

    Args:
        x: [..., D].
        weight: [D] fp32, or None.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


class RMSNorm(Module):
    """RMS normalisation with a weight; the weight is fp32 and multiplied in fp32."""

    def __init__(self, dim: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((dim,), torch.float32, device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim] in the dtype of `x`."""
        return rms_normalize(x, self.eps, self.weight)
