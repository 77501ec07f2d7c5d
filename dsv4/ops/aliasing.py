"""Outputs that a caller gives: launches on a GPU do not look where their tensors lie."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dsv4.ops.runtime.checks import check_aliasing
from dsv4.ops.runtime.kernel_op import KernelOp

# Names of x, its codes, and of what epilogues write.
OF_EPILOGUE = ("x", "squares", "head_scales")


def check_given(op: KernelOp, *tensors: Tensor | None) -> None:
    """Refuse outputs that share memory with another argument: ValueError. The implementations for
    CPU tensors look by themselves.

    Args:
        tensors: the first ones of the operator's table.
    """
    first = tensors[0]
    if first is None or not first.is_cuda or torch.compiler.is_compiling():
        return
    if not isinstance(first, FakeTensor):  # which lies nowhere
        # What is no tensor is named where types are looked at.
        found = [tensor if isinstance(tensor, Tensor) else None for tensor in tensors]
        check_aliasing(op.tensors[: len(tensors)], found)


def check_epilogue(op: KernelOp, *tensors: Tensor | None) -> None:
    """The same where the outputs of a linear are new, but not what its epilogues write, which is
    compared with x alone: layers call it so, and each tensor takes the host microseconds."""
    pairs = zip(op.tensors, tensors)
    looked = (tensor if arg.name.startswith(OF_EPILOGUE) else None for arg, tensor in pairs)
    check_given(op, *looked)
