"""`plain_linear`: linear layer with a bf16 weight, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.gemm import plain_plan as plans
from dsv4.kernels.gemm.config import has_kernel
from dsv4.kernels.gemm.plain_args import ARGS, values
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.sm100 import plain_plan as blackwell_plans
from dsv4.ops.aliasing import check_given
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.state import smallest_call
from dsv4.quoting import quoted

VOCABULARY = 129_280
MODEL_HEADS = {"Flash head": (4096, VOCABULARY), "Pro head": (7168, VOCABULARY)}

# Tilings of an architecture, and which one a launch takes.
PLANS = {"sm_90a": plans, "sm_100a": blackwell_plans, "sm_103a": blackwell_plans}


class PlainLinear(KernelOp):
    """y = x W^T in bf16, with fp32 sums."""

    name = "plain_linear"
    config = PlainLinearConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.gemm.sm90.plain_linear",
        "sm_100a": "dsv4.kernels.gemm.sm100.plain_linear",
        "sm_103a": "dsv4.kernels.gemm.sm100.plain_linear",
    }
    early = ("weight",)

    def values(self, config: PlainLinearConfig) -> Mapping[str, int | str]:
        return values(config)

    def compiled_config(self, config: PlainLinearConfig, arch: str) -> PlainLinearConfig:
        """M is known at run time."""
        return replace(config, out_features=1)

    def plan(self, config: PlainLinearConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Index of the tiling, and number of SMs."""
        return PLANS[device.arch].choose(sizes["T"]), device.num_sms

    def torch(self, config: PlainLinearConfig, x: Tensor, weight: Tensor, out: Tensor) -> None:
        # bf16 products are exact in fp32.
        out.copy_(F.linear(x.to(out.dtype), weight.to(out.dtype)))

    def probes(
        self, config: PlainLinearConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """One token through every tiling."""
        for tiling in range(len(PLANS[target.arch].TILINGS)):
            yield tuple(smallest_call(self, config, (tiling, target.num_sms), device))

    def aot(self) -> Mapping[str, PlainLinearConfig]:
        """The heads of Flash and Pro."""
        return {label: PlainLinearConfig(*given) for label, given in MODEL_HEADS.items()}


PLAIN_LINEAR = PlainLinear()
_op = PLAIN_LINEAR.overload


def plain_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply T tokens with a bf16 weight, as a language model's head does.

    y[t, m] = sum over k of x[t, k] * weight[m, k]. On Hopper the tensor core sums the products of a
    slice of K in fp32, and slices are added as a balanced tree, in an order that K alone decides;
    on Blackwell it sums all of K. The bits of a token depend on neither T nor the other tokens,
    which may hold anything.

    Launches may begin while the one before ends: `weight` must not be what a kernel of this package
    wrote just before.

    Args:
        x: [T, K] bfloat16; or float32, on GPUs too by the torch implementation. K is a multiple of
            512 up to 16,384.
        weight: [M, K] of the dtype of x.
        out: [T, M] to write into; default a new tensor.
        out_dtype: bfloat16 or float32; default that of `out`, else float32.

    Returns:
        y [T, M].

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            PLAIN_LINEAR.check_no_gradients(x, weight, out)
        tokens, width = x.shape
        rows = weight.shape[0]
        if out_dtype is None:
            out_dtype = torch.float32 if out is None else out.dtype
        name = str(out_dtype).removeprefix("torch.")
        identity = plain_linear_runner_id(index(width), index(rows), name)
        if out is None:
            out = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
        else:
            check_given(PLAIN_LINEAR, x, weight, out)
        _op(x, weight, out, identity)
    except Exception:
        PLAIN_LINEAR.explain(x, weight, out)
        if not isinstance(out_dtype, torch.dtype | None):
            raise TypeError(f"out_dtype: got {quoted(out_dtype)}, needs a torch.dtype") from None
        raise
    return out


@torch.compiler.assume_constant_result
def plain_linear_runner_id(in_features: int, out_features: int, out_dtype: str = "float32") -> int:
    """Id of a configuration: what `torch.ops.dsv4.plain_linear` takes.

    Args:
        in_features, out_features: K and M of the weight.
        out_dtype: "bfloat16" or "float32".
    """
    return PLAIN_LINEAR.runner_id(in_features, out_features, out_dtype)


def takes(in_features: int) -> bool:
    """Whether `plain_linear` takes weights of this width."""
    return has_kernel(in_features)
