"""`rms_norm_fp8`: RMSNorm of rows with FP8 quantisation of its output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.rows.config import GROUP, VECTOR
from dsv4.ops.quantize import quantize_e4m3


def rms_norm_rows(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) [* weight] of rows [T, d] in fp32, rounded once to the dtype of x.

    The mean has one order of additions on every device, for any number of rows.
    """
    wide = x.float()
    mean = sum_in_order(wide.square()) / x.shape[1]
    # Through fp64: of torch's fp32 functions neither sqrt on the CPU nor rsqrt on CUDA is rounded
    # correctly.
    rms = (mean + eps).double().sqrt().float()
    wide = wide * rms.reciprocal().unsqueeze(1)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def sum_in_order(x: Tensor) -> Tensor:
    """Sum of rows [T, d] -> [T], d a multiple of 128, as a binary tree.

    Halves are added: first within every 8 elements, then among the 16 sums of a group of 128, then
    among the groups, padded with zeros to a power of two.
    """
    groups = x.shape[1] // GROUP
    sums = _add_halves(_add_halves(x.unflatten(1, (groups, GROUP // VECTOR, VECTOR))))
    return _add_halves(F.pad(sums, (0, (1 << (groups - 1).bit_length()) - groups)))


def _add_halves(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        low, high = x.chunk(2, -1)
        x = low + high
    return x.squeeze(-1)


def rms_norm_fp8_torch(
    x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and normalised rows, in plain torch, on any device."""
    norm = rms_norm_rows(x, weight, eps)
    return *quantize_e4m3(norm, GROUP), norm
