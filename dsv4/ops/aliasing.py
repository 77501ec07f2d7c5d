"""Outputs that a caller gives: launches on a GPU do not look where their tensors lie."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.runtime.checks import check_aliasing
from dsv4.ops.runtime.kernel_op import KernelOp


def check_given(op: KernelOp, *tensors: Tensor | None) -> None:
    """Refuse outputs that share memory with another argument: ValueError. The implementations for
    CPU tensors look by themselves.

    Args:
        tensors: the first ones of the operator's table.
    """
    if tensors[0] is not None and tensors[0].is_cuda and not torch.compiler.is_compiling():
        check_aliasing(op.tensors[: len(tensors)], tensors)
