"""Layouts of queries, keys and values: heads before rows, after them, or innermost-first."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.lowp.config import VECTOR_BYTES
from dsv4.quoting import quoted

LAYOUTS = ("HND", "NHD")


def check_layout(tensor_layout: object) -> None:
    """Refuse what is neither layout: ValueError."""
    if not isinstance(tensor_layout, str) or tensor_layout not in LAYOUTS:
        raise ValueError(f"tensor_layout: got {quoted(tensor_layout)}, needs 'HND' or 'NHD'")


def check_rank(name: str, tensor: Tensor, is_varlen: bool) -> None:
    """Refuse a tensor of the wrong number of dimensions: ValueError."""
    rank = 3 if is_varlen else 4
    if tensor.dim() != rank:
        needs = "[rows, heads, channels] beside cu_seqlens" if is_varlen else "4 dimensions"
        raise ValueError(f"{name}: got shape {quoted(tensor.shape)}, needs {needs}")


def heads_first(x: Tensor, tensor_layout: str) -> Tensor:
    """A view [b, H, rows, d] of a tensor in a layout; of packed rows [T, H, d] b is 1."""
    if x.dim() == 3:
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if tensor_layout == "NHD" else x


def aligned(x: Tensor) -> Tensor:
    """The tensor, copied where rows of whole vectors do not start at multiples of one, as kernels
    load them."""
    if x.stride(-1) != 1:
        return x  # which the operator refuses
    elements = VECTOR_BYTES // x.element_size()
    # While a graph is traced there is no offset: then the operator refuses it.
    offset = 0 if torch.compiler.is_compiling() else x.storage_offset()
    starts = (offset, *(s for n, s in zip(x.shape[:-1], x.stride()) if n > 1))
    if x.shape[-1] % elements or not any(start % elements for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)
