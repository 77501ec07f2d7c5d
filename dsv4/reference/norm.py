"""RMSNorm, plain and with FP8 quantisation of its output."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.quantize import quantize_e4m3


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, times the weight if there is one. FP32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.float()


def rms_norm_fp8(
    x: Tensor, weight: Tensor | None, eps: float, block: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm rounded to the dtype of `x`, then Q8 with one power-of-two scale per `block`.

    Args:
        x: [..., D]; D a multiple of `block`.
        weight: [D] or None.

    Returns:
        values [..., D] FP32 on the e4m3 grid, scales [..., D / block] FP32, and the normalised rows
        [..., D] in the dtype of `x`: they are values * scale but for e4m3's rounding.
    """
    norm = rms_norm(x, weight, eps).to(x.dtype)
    return *quantize_e4m3(norm, block), norm
