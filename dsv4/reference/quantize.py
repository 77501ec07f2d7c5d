"""Quantisers of DeepSeek-V4, written out bit by bit in FP32.

The number formats (OCP FP8 and microscaling):

* e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa bits, largest value 448, no infinities;
* e2m1: the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; code 8 is -0;
* e8m0: a byte b that means 2^(b - 127), 255 is NaN.

Scales of activations are powers of two, rounded up (official `inference/kernel.py`, `act_quant` and
`fp4_quant`), but in NVFP4, which NVIDIA's checkpoints have, e4m3 numbers. Every fake quantiser
passes gradients straight through, so that a model can be trained under it.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Floors of a group's largest magnitude: no scale of an all-zero group is zero.
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = 6 * 2.0**-126


class _StraightThrough(torch.autograd.Function):
    """Value of the second argument, gradient of the first; x + (y - x).detach() is not exact."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, y: Tensor) -> Tensor:
    """`y`, differentiated as if it were `x` (the straight-through estimator)."""
    return _StraightThrough.apply(x, y.detach())


def exp2_int(exponent: Tensor) -> Tensor:
    """2^exponent as FP32 for int32 exponents in -126..127; writes the exponent field."""
    return ((exponent + 127) << 23).view(torch.float32)


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2 |x|) as int32 from the exponent field; -127 for zero and subnormals."""
    return ((x.float().contiguous().view(torch.int32) >> 23) & 0xFF) - 127


def ceil_log2(x: Tensor) -> Tensor:
    """ceil(log2 x) as int32 for positive normal FP32 x.

    Read from the bits: an approximate log2 is off by one at exact powers of two, which doubles a
        scale.
    """
    bits = x.float().contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _round_to_grid(x: Tensor, mantissa_bits: int, min_exponent: int) -> Tensor:
    """Nearest value of the format, ties to even; below 2^min_exponent the grid is uniform."""
    step = exp2_int(floor_log2(x).clamp(min=min_exponent) - mantissa_bits)
    return torch.round(x / step) * step


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value as FP32, ties to even, saturating at +-448."""
    return _round_to_grid(x.float().clamp(-E4M3_MAX, E4M3_MAX), mantissa_bits=3, min_exponent=-6)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value as FP32, ties to even, saturating at +-6."""
    return _round_to_grid(x.float().clamp(-E2M1_MAX, E2M1_MAX), mantissa_bits=1, min_exponent=0)


def _grouped(x: Tensor, block: int, name: str) -> Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"{name}: last dimension must be a multiple of {block}, got {x.shape[-1]}")
    return x.float().unflatten(-1, (-1, block))


def quantize_e4m3(x: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Q8: groups of `block` along the last dimension share a power-of-two scale.

    Args:
        x: [..., K], any float dtype; K a multiple of `block`.
        block: group length.

    Returns:
        values [..., K] FP32 on the e4m3 grid, and scales [..., K / block] FP32: x ~ values * scale.
    """
    groups = _grouped(x, block, "quantize_e4m3")
    amax = groups.abs().amax(-1).clamp(min=E4M3_AMAX_FLOOR)
    scale = exp2_int(ceil_log2(amax * (1 / E4M3_MAX)))
    return round_e4m3(groups / scale[..., None]).flatten(-2), scale


def quantize_e2m1(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Q4: as `quantize_e4m3`, with e2m1 values."""
    groups = _grouped(x, block, "quantize_e2m1")
    amax = groups.abs().amax(-1).clamp(min=E2M1_AMAX_FLOOR)
    # The exponent field holds no less than -126: a scale below is out of e8m0's and FP32's normal
    # range.
    scale = exp2_int(ceil_log2(amax * (1 / E2M1_MAX)).clamp(min=-126))
    return round_e2m1(groups / scale[..., None]).flatten(-2), scale


def fake_quantize_e4m3(x: Tensor, block: int = 128) -> Tensor:
    """Q8 and back, FP32; gradients pass straight through."""
    values, scale = quantize_e4m3(x, block)
    return straight_through(x, values * scale.repeat_interleave(block, -1))


def fake_quantize_e2m1(x: Tensor, block: int = 32) -> Tensor:
    """Q4 and back, FP32; gradients pass straight through."""
    values, scale = quantize_e2m1(x, block)
    return straight_through(x, values * scale.repeat_interleave(block, -1))


def quantize_nvfp4(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4: groups of 16 share an e4m3 scale in units of a given one.

    Args:
        x: [..., K]; K a multiple of 16.
        whole: FP32, of leading dimensions of x: the tensor's scale.

    Returns:
        values [..., K] FP32 on the e2m1 grid, and scales [..., K / 16] FP32 on that of e4m3: x ~
        values * scale * whole.
    """
    groups, whole = _grouped(x, 16, "quantize_nvfp4"), whole.float()[..., None]
    scale = round_e4m3(groups.abs().amax(-1) / (E2M1_MAX * whole))
    step = (scale * whole)[..., None]
    # Of a group whose scale has become zero nothing is left.
    quotient = torch.where(step == 0, 0.0, groups / step)
    return round_e2m1(quotient).flatten(-2), scale


def fake_quantize_nvfp4(x: Tensor, whole: Tensor) -> Tensor:
    """`quantize_nvfp4` and back, FP32; gradients pass straight through."""
    values, scale = quantize_nvfp4(x, whole)
    step = scale * whole.float()[..., None]
    return straight_through(x, values * step.repeat_interleave(16, -1))
