"""Tensors made from an argument table: outputs, stand-ins for absent ones, probes, poison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dsv4.kernels.kit.args import TensorArg, Values


def empty(
    arg: TensorArg, values: Values, sizes: Mapping[str, int], device: torch.device | str
) -> Tensor:
    """An uninitialised tensor of a declaration; `sizes` gives what `values` does not fix."""
    shape = tuple(int(values[name] if name in values else sizes[name]) for name in arg.shape)
    return torch.empty(shape, dtype=getattr(torch, arg.dtype_in(values)), device=device)


def absent(
    arg: TensorArg, values: Values, device: torch.device, sizes: Mapping[str, int] | None = None
) -> Tensor:
    """What a kernel gets for an optional tensor that is None: one without rows, whose outer strides
    are aligned as the kernel takes them for granted; inner `sizes` are those of the launch."""
    known = {**(sizes or {}), **values}
    shape = (0, *(int(known.get(name, 0)) for name in arg.shape[1:]))
    dtype = getattr(torch, arg.dtype_in(values))
    granule = max(arg.row_alignment(values) // dtype.itemsize, 1)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, -(-max(size, 1) * strides[0] // granule) * granule)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def poison_(tensors: Iterable[Tensor | None]) -> None:
    """Fill tensors with what no right result holds: NaN, or all bits set in integers and FP8."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor.fill_(torch.nan)
        elif tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(-1)
