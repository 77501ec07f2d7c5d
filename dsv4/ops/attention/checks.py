"""Argument checks of `sparse_fmha_with_swa`.

Each error names the argument, what it got and what it needs. Only metadata is looked at, which
never synchronises; `check_values` reads values and is for CPU tensors alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig

_DTYPES = (torch.bfloat16, torch.float32)
_TENSORS = (
    *("q", "compressed_kv", "swa_kv", "swa_lens", "sink_logits", "request_ids", "o"),
    *("compressed_lens", "lse", "workspace"),
)
_DIFFERENTIABLE = ("q", "compressed_kv", "swa_kv", "sink_logits", "o")
_ROW_ALIGNMENT = 16  # bytes; what TMA and 128-bit loads need


def check_arguments(
    config: FmhaConfig,
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    o: Tensor,
    compressed_lens: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """Check shapes, dtypes, devices, strides and autograd state; ValueError or TypeError."""
    dtype, device = q.dtype, q.device
    if dtype not in _DTYPES:
        raise TypeError(f"q: got {dtype}, needs torch.bfloat16 or torch.float32")
    if q.dim() != 3:
        raise ValueError(f"q: got shape {tuple(q.shape)}, needs [T, n_h, head_dim]")
    tokens, heads, head_dim = q.shape
    if heads != config.num_query_heads or head_dim != config.head_dim:
        raise ValueError(
            f"q: got shape {tuple(q.shape)}, this runner needs "
            f"[T, {config.num_query_heads}, {config.head_dim}]"
        )
    int32, float32 = torch.int32, torch.float32
    _check("compressed_kv", compressed_kv, dtype, device, (tokens, None, head_dim))
    _check("swa_kv", swa_kv, dtype, device, (None, None, head_dim))
    _check("swa_lens", swa_lens, int32, device, (swa_kv.shape[0],))
    _check("sink_logits", sink_logits, float32, device, (heads,))
    _check("request_ids", request_ids, int32, device, (tokens,))
    _check("o", o, dtype, device, (tokens, heads, head_dim))
    if compressed_lens is not None:
        _check("compressed_lens", compressed_lens, int32, device, (tokens,))
    if lse is not None:
        _check("lse", lse, float32, device, (tokens, heads))
    if workspace is not None and workspace.device != device:
        raise ValueError(f"workspace: got a tensor on {workspace.device}, q is on {device}")
    if compressed_kv.shape[1] > config.top_k:
        raise ValueError(
            f"compressed_kv: got {compressed_kv.shape[1]} rows per token, this runner takes at "
            f"most top_k = {config.top_k}"
        )
    for name, tensor in (("q", q), ("compressed_kv", compressed_kv), ("swa_kv", swa_kv), ("o", o)):
        _check_rows(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad(q, compressed_kv, swa_kv, sink_logits, o)


def check_ranks(q: Tensor, compressed_kv: Tensor, swa_kv: Tensor) -> None:
    """Check that q and both KV tensors have three dimensions, before any size is read off them."""
    shapes = {
        "q": (q, "[T, n_h, head_dim]"),
        "compressed_kv": (compressed_kv, "[T, top_k, head_dim]"),
        "swa_kv": (swa_kv, "[batch, W, head_dim]"),
    }
    for name, (tensor, need) in shapes.items():
        if tensor.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, needs {need}")


def check_no_grad(
    q: Tensor, compressed_kv: Tensor, swa_kv: Tensor, sink_logits: Tensor, o: Tensor | None
) -> None:
    """Refuse inputs that require grad: the operator has no backward pass."""
    tensors = (q, compressed_kv, swa_kv, sink_logits, o)
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            break
    else:
        return
    name = next(name for name, other in zip(_DIFFERENTIABLE, tensors) if other is tensor)
    raise ValueError(
        f"{name}: requires grad, but sparse_fmha_with_swa has no backward pass; "
        "call it under torch.no_grad() or pass a detached tensor"
    )


def check_kernel_layout(*tensors: Tensor | None) -> None:
    """Refuse what torch code accepts but GPU kernels cannot load; tensors in the op's order.

    Vectors and rows must be contiguous; bfloat16 rows must start at multiples of 16 bytes.
    """
    for name, tensor in zip(_TENSORS, tensors):
        if tensor is None or tensor.numel() == 0:
            continue
        if tensor.is_floating_point() and tensor.dim() == 3 and tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name}: got {tensor.dtype}, the kernel needs torch.bfloat16")
        _check_rows(name, tensor)
        if tensor.dim() != 3:
            continue
        size = tensor.element_size()
        steps = [n * size for n, extent in zip(tensor.stride()[:-1], tensor.shape) if extent > 1]
        if any(n % _ROW_ALIGNMENT for n in (tensor.data_ptr(), *steps)):
            raise ValueError(
                f"{name}: got strides {tuple(tensor.stride())} at address {tensor.data_ptr():#x}, "
                f"every row must start at a multiple of {_ROW_ALIGNMENT} bytes"
            )


def check_values(config: FmhaConfig, swa_kv: Tensor, request_ids: Tensor) -> None:
    """Check what only the values of `request_ids` can tell. For CPU tensors: it reads them."""
    if request_ids.numel() == 0:
        return
    batch = swa_kv.shape[0]
    low, high = (int(bound) for bound in request_ids.aminmax())
    if low < -1 or high >= batch:
        raise ValueError(
            f"request_ids: got values from {low} to {high}, needs -1 (padding) to {batch - 1}, "
            f"the rows of swa_kv {tuple(swa_kv.shape)}"
        )
    if config.is_causal:
        runs = request_ids.unique_consecutive()
        runs = runs[runs >= 0]
        if runs.numel() != runs.unique().numel():
            raise ValueError(
                "request_ids: with is_causal the tokens of a request must be consecutive, "
                f"got {_shorten(request_ids.tolist())}"
            )


def _check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int | None, ...],
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, needs {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, q is on {device}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(
        need is not None and got != need for got, need in zip(actual, shape)
    ):
        wanted = ", ".join("any" if need is None else str(need) for need in shape)
        raise ValueError(f"{name}: got shape {tuple(actual)}, needs [{wanted}]")


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name}: got strides {tuple(tensor.stride())}, the last dimension must be contiguous"
        )


def _shorten(values: list[int], limit: int = 16) -> str:
    return str(values) if len(values) <= limit else f"{str(values[:limit])[:-1]}, ...]"
