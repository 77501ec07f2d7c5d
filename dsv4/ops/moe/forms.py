"""Orders of expert weights that a device's kernels read, and what they round."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.ops.moe.op import FORMS, MOE, dtype_name, kernel_device
from dsv4.ops.moe.weights import GatedWeights, block_scale_dtype
from dsv4.ops.runtime.backend import device_of


def prepared_forms(
    gate: Tensor,
    experts: GatedWeights,
    shared: GatedWeights,
    block: tuple[int, int],
    top_k: int,
) -> tuple[str, ...]:
    """Forms of these weights, prepared, that kernels of their device take; none where there are no
    kernels for them."""
    device = kernel_device(gate)
    if device is None:
        return ()
    count, inner = experts.w1.shape[:2]
    scale = shared.w1_scale if shared.w1_scale is not None else experts.w1_scale
    config = MoeConfig(
        gate.shape[1], inner, count, top_k, experts.dtype_name, shared.dtype_name,
        dtype_name(gate.dtype), block_scale_dtype(scale), *block,
    )  # fmt: skip
    forms = FORMS[device.arch]
    if not MOE.has_kernel(config) or not MOE.serves(replace(config, form=forms[0]), device.arch):
        return ()
    is_nvfp4 = experts.dtype_name == "nvfp4"
    return () if is_nvfp4 and "tiled" in forms and not experts.rounds_to_nvfp4 else forms


def rounds_to_nvfp4(form: str, x: Tensor) -> bool:
    """Whether experts in NVFP4 round activations to it whose scales are known: everywhere but on
    Hopper (W4A16), whatever its implementation, and with weights prepared for it."""
    if form in FORMS["sm_90a"]:
        return False
    return not x.is_cuda or not _is_hopper(x.get_device())


@torch.compiler.assume_constant_result
def _is_hopper(index: int) -> bool:
    device = device_of(index)
    return device is not None and device.arch == "sm_90a"
