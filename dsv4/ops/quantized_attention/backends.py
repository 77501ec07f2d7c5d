"""Limits of GPUs: formats that tensor cores do not multiply are refused by name, other options
without a kernel run in torch, with one warning.
"""

from __future__ import annotations

import functools
import warnings

import torch

from dsv4.kernels.lowp.config import ABSENT_PRODUCTS, GRANULARITIES, without_kernel
from dsv4.ops.quantized_attention.knobs import is_set
from dsv4.ops.runtime import backend
from dsv4.ops.runtime.kernel_op import KernelOp
from dsv4.ops.runtime.registry import OPS
from dsv4.ops.runtime.runner import config_of
from dsv4.quoting import quoted

GPU = "cuda"


def check_device(op: KernelOp, identity: int, device: torch.device) -> None:
    """Refuse a configuration on a GPU whose tensor cores lack its products, or say that torch runs
    it: ValueError, RuntimeWarning."""
    if device.type == GPU and not is_set("torch_code"):
        _check(op.name, identity, device.index or 0)


@torch.compiler.assume_constant_result
def _check(name: str, identity: int, index: int) -> None:
    check_once(name, identity, index)


@functools.cache
def check_once(name: str, identity: int, index: int) -> None:
    """The same of a device by its number; a configuration that is not refused, once."""
    device = None if backend.torch_is_chosen() else backend.device_of(index)
    if device is None:
        return
    op = OPS[name]
    config, arch = config_of(op, identity), device.arch
    absent = ABSENT_PRODUCTS.get(arch, ())
    if config.qk in absent:
        others = " or ".join(repr(qk) for qk in GRANULARITIES if qk not in absent)
        raise ValueError(
            f"qk: got {quoted(config.qk)}, which tensor cores of {arch} do not multiply, needs "
            f"{others}; DSV4_OPS=torch or DSV4_SAGE_FORCE_SIMPLE_QK=1 computes it in torch"
        )
    missing = without_kernel(config, arch) if arch in op.kernels else ""
    if missing:
        warnings.warn(
            f"{op.name}: no kernel of {arch} has {missing}; the slower torch implementation is "
            "used",
            RuntimeWarning,
            stacklevel=5,
        )
