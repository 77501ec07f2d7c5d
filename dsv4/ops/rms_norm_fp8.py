"""`rms_norm_fp8`: RMSNorm of rows with FP8 quantisation of its output, as function and operator."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.arch import ARCHS
from dsv4.kernels.rows.args import ARGS, values
from dsv4.kernels.rows.config import GROUP, VECTOR, RmsNormFp8Config, choose_tiling
from dsv4.ops.quantize import quantize_e4m3
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_are_tensors, check_flag, check_ranks
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes

# Rows that the released models normalise and then quantise: hidden states and query latents.
MODEL_DIMS = {"Flash hidden": 4096, "Flash q": 1024, "Pro hidden": 7168, "Pro q": 1536}
MODEL_EPS = 1e-6


class RmsNormFp8(KernelOp):
    """RMSNorm, then e4m3 codes with one power-of-two scale per 128 elements."""

    name = "rms_norm_fp8"
    config = RmsNormFp8Config
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.rows.rms_norm_fp8")
    early = ("weight",)

    def values(self, config: RmsNormFp8Config) -> Mapping[str, int | str]:
        return values(config)

    def plan(self, config: RmsNormFp8Config, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Number of CTAs that run at a time."""
        return (choose_tiling(config.dim).ctas_per_sm * device.num_sms,)

    def torch(
        self,
        config: RmsNormFp8Config,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        scale_out: Tensor,
        norm_out: Tensor | None,
    ) -> None:
        gains = None if config.weight_dtype is None else weight
        norm = rms_norm_rows(x, gains, config.eps)
        codes, scales = quantize_e4m3(norm, GROUP)
        out.copy_(codes)
        scale_out.copy_(scales)
        if norm_out is not None:
            norm_out.copy_(norm)

    def aot(self) -> Mapping[str, RmsNormFp8Config]:
        """Norms of Flash and Pro before FP8 linears; the model holds their weights in fp32."""
        return {
            f"{label}, {dim}": RmsNormFp8Config(dim, MODEL_EPS) for label, dim in MODEL_DIMS.items()
        }


RMS_NORM_FP8 = RmsNormFp8()
_op = RMS_NORM_FP8.overload


def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    norm_out: Tensor | None = None,
    return_norm: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Normalise T rows and quantise them for FP8 linears: what these round their input to.

    y = x / sqrt(mean(x^2) + eps) * weight in fp32, rounded once to the dtype of x; then, for each
    128 elements of y, the scale 2^ceil(log2(max(amax, 1e-4) / 448)) and the codes e4m3(y / scale).
    A row's bits depend on nothing but the row: not on T, nor on the device.

    A group with a NaN or Inf in y has the scale NaN (255), codes of NaN for its NaN and Inf, and
    codes of 0 for the rest; other rows never notice. A row with an Inf is 0 but for the Inf itself,
    which becomes NaN, and one whose squares overflow fp32 (|x| > 1.8e19) is 0. So padding rows may
    hold anything.

    Args:
        x: [T, d] bfloat16; or float32, on GPUs too by the torch implementation. d is a multiple of
            128 up to 16,384. Rows are contiguous and start at multiples of 16 bytes.
        weight: [d] float32 or bfloat16; None: no weight. GPUs read it while the launch before may
            still run: it must not be what a kernel with programmatic dependent launch just writes.
        eps: added to the mean square; at least 1e-18.
        out: [T, d] float8_e4m3fn to write codes into; default a new tensor.
        scale_out: [T, d / 128] float8_e8m0fnu to write scales into; default a new tensor.
        norm_out: [T, d] in the dtype of x, to write y into.
        return_norm: also return y, in `norm_out` or a new tensor.

    Returns:
        (codes, scales), or (codes, scales, y).

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    gains = weight
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            RMS_NORM_FP8.check_no_gradients(x, weight, out, scale_out, norm_out)
        tokens, dim = x.shape
        dtype = None if weight is None else _WEIGHT_DTYPES.get(weight.dtype, "float32")
        if weight is None:
            gains = torch.empty(0, device=x.device)
        identity = rms_norm_fp8_runner_id(index(dim), eps, dtype)
        if out is None:
            out = torch.empty((tokens, dim), dtype=torch.float8_e4m3fn, device=x.device)
        if scale_out is None:
            shape = (tokens, dim // GROUP)
            scale_out = torch.empty(shape, dtype=torch.float8_e8m0fnu, device=x.device)
        if return_norm and norm_out is None:
            norm_out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
        _op(x, gains, out, scale_out, identity, norm_out)
    except Exception:
        _explain(x, gains, out, scale_out, norm_out)
        check_flag("return_norm", return_norm)
        raise
    return (out, scale_out, norm_out) if return_norm else (out, scale_out)


@torch.compiler.assume_constant_result
def rms_norm_fp8_runner_id(dim: int, eps: float, weight_dtype: str | None = "float32") -> int:
    """Id of a configuration: what `torch.ops.dsv4.rms_norm_fp8` takes.

    Args:
        dim: elements of a row.
        eps: added to the mean square.
        weight_dtype: "float32", "bfloat16", or None: the operator then ignores its `weight`.
    """
    return RMS_NORM_FP8.runner_id(dim, eps, weight_dtype)


_WEIGHT_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _explain(*tensors: object) -> None:
    """Name the argument of a failed call that is of the wrong type or rank."""
    given = [
        (arg, tensor)
        for arg, tensor in zip(RMS_NORM_FP8.tensors, tensors)
        if tensor is not None or arg.name == "x"
    ]
    args, found = zip(*given)
    check_are_tensors(args, found)
    check_ranks(args, found)


# ---- torch implementation ------------------------------------------------------------------------


def rms_norm_rows(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) [* weight] of rows [T, d] in fp32, rounded once to the dtype of x.

    The mean has one order of additions on every device, for any number of rows.
    """
    wide = x.float()
    total = sum_in_order(wide.square())
    # By a tensor: CUDA divides by a number as if it multiplied by its rounded reciprocal.
    mean = total / torch.full_like(total, x.shape[1])
    # Through fp64: of torch's fp32 functions neither sqrt on the CPU nor rsqrt on CUDA is rounded
    # correctly.
    rms = (mean + eps).double().sqrt().float()
    wide = wide * rms.reciprocal().unsqueeze(1)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def sum_in_order(x: Tensor) -> Tensor:
    """Sum of rows [T, d] -> [T] as a binary tree.

    Halves are added: first within every 8 elements, then among the 16 sums of a group of 128, then
    among the groups; zeros fill the last group, and the groups to a power of two.
    """
    x = F.pad(x, (0, -x.shape[1] % GROUP))
    groups = x.shape[1] // GROUP
    sums = _add_halves(_add_halves(x.unflatten(1, (groups, GROUP // VECTOR, VECTOR))))
    return _add_halves(F.pad(sums, (0, (1 << (groups - 1).bit_length()) - groups)))


def _add_halves(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        low, high = x.chunk(2, -1)
        x = low + high
    return x.squeeze(-1)
