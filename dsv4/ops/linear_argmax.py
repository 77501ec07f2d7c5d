"""`linear_argmax`: row of a bf16 weight with which each token has the largest product, as function
and operator."""

from __future__ import annotations

import math
from operator import index
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.gemm.argmax_args import ARGS
from dsv4.kernels.gemm.epilogues import ArgMax
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.ops.aliasing import check_given
from dsv4.ops.plain_linear import PlainLinear
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.kernel_op import Sizes

FAILED = -1  # in place of a row


class LinearArgMax(PlainLinear):
    """arg max over m of x W^T, in bf16 with fp32 sums."""

    name = "linear_argmax"
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.gemm.sm90.linear_argmax",
        "sm_100a": "dsv4.kernels.gemm.sm100.linear_argmax",
        "sm_103a": "dsv4.kernels.gemm.sm100.linear_argmax",
    }
    early = ("weight",)

    def plan(self, config: PlainLinearConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Index of the tiling, and number of SMs; refuses a weight without rows."""
        _check_rows(sizes["M"])
        return super().plan(config, sizes, device)

    def check_sizes(self, config: PlainLinearConfig, *tensors: Tensor | None) -> None:
        _check_rows(tensors[1].shape[0])

    def workspace_size(
        self, config: PlainLinearConfig, sizes: Sizes, scalars: tuple[int, ...]
    ) -> int:
        return ArgMax.workspace_words(sizes["T"])

    def max_workspace_size(self, config: PlainLinearConfig, rows: int, device: Device) -> int:
        return ArgMax.workspace_words(rows)

    def torch(
        self,
        config: PlainLinearConfig,
        x: Tensor,
        weight: Tensor,
        rows: Tensor,
        out: Tensor | None,
    ) -> None:
        dtype = getattr(torch, config.out_dtype)
        # bf16 products are exact in fp32.
        y = F.linear(x.to(dtype), weight.to(dtype))
        if out is not None:
            out.copy_(y)
        best, found = y.max(-1)
        # A maximum is NaN where any value is.
        rows.copy_(torch.where(best > -math.inf, found, FAILED))


LINEAR_ARGMAX = LinearArgMax()
_op = LINEAR_ARGMAX.overload


def linear_argmax(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Find the likeliest of a language model's tokens: the row of its head with the largest logit.

    rows[t] = arg max over m of y[t, m], the first of equals, of the y that `plain_linear` gives,
    bit for bit. On Hopper and Blackwell the product's CTAs compare what they have, and y is written
    only where it is asked for.

    Launches may begin while the one before ends: `weight` must not be what a kernel of this package
    wrote just before.

    Args:
        x: [T, K] bfloat16; or float32, on GPUs too by the torch implementation. K is a multiple of
            512 up to 16,384.
        weight: [M, K] of the dtype of x.
        out: [T, M] float32 or bfloat16 to write y into, rounded before it is compared; default:
            compared in float32, and not written.

    Returns:
        [T] int64; -1 where some y is NaN, or every one minus infinity.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    rows = None
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            LINEAR_ARGMAX.check_no_gradients(x, weight, rows, out)
        tokens, width = x.shape
        dtype = torch.float32 if out is None else out.dtype
        name = str(dtype).removeprefix("torch.")
        identity = linear_argmax_runner_id(index(width), index(weight.shape[0]), name)
        rows = torch.empty(tokens, dtype=torch.int64, device=x.device)
        if out is not None:
            check_given(LINEAR_ARGMAX, x, weight, rows, out)
        _op(x, weight, rows, identity, out)
    except Exception:
        LINEAR_ARGMAX.explain(x, weight, rows, out)
        raise
    return rows


@torch.compiler.assume_constant_result
def linear_argmax_runner_id(in_features: int, out_features: int, out_dtype: str = "float32") -> int:
    """Id of a configuration: what `torch.ops.dsv4.linear_argmax` takes.

    Args:
        in_features, out_features: K and M of the weight.
        out_dtype: "bfloat16" or "float32", that of y.
    """
    return LINEAR_ARGMAX.runner_id(in_features, out_features, out_dtype)


def _check_rows(rows: int) -> None:
    if rows == 0:
        raise ValueError("weight: got 0 rows, needs at least one")
