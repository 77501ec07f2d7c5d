"""Sinkhorn's passes of the mHC mixing as one Triton kernel each way, for training.

Operation by operation the twenty passes of every sublayer are thousands of launches a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64


@triton.jit
def _forward(x_ptr, y_ptr, rows, iterations: tl.constexpr, eps: tl.constexpr, BLOCK: tl.constexpr):
    """y [rows, 4, 4] of scores x; the passes are those of `dsv4.reference.mhc.sinkhorn`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    at = row[:, None, None] * 16 + cell
    inside = row[:, None, None] < rows
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    a = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    a = a / tl.sum(a, axis=2, keep_dims=True) + eps
    a = a / (tl.sum(a, axis=1, keep_dims=True) + eps)
    for _ in range(iterations - 1):
        a = a / (tl.sum(a, axis=2, keep_dims=True) + eps)
        a = a / (tl.sum(a, axis=1, keep_dims=True) + eps)
    tl.store(y_ptr + at, a, mask=inside)


@triton.jit
def _backward(
    x_ptr,
    grad_ptr,
    dx_ptr,
    saved_ptr,
    rows,
    iterations: tl.constexpr,
    eps: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of grad; saved [2 * iterations, rows, 4, 4] holds what each division divides."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    at = row[:, None, None] * 16 + cell
    inside = row[:, None, None] < rows
    plane = rows.to(tl.int64) * 16
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    a = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    soft = a / tl.sum(a, axis=2, keep_dims=True)
    a = soft + eps
    tl.store(saved_ptr + at, a, mask=inside)
    a = a / (tl.sum(a, axis=1, keep_dims=True) + eps)
    for i in range(1, iterations):
        tl.store(saved_ptr + (2 * i - 1) * plane + at, a, mask=inside)
        a = a / (tl.sum(a, axis=2, keep_dims=True) + eps)
        tl.store(saved_ptr + 2 * i * plane + at, a, mask=inside)
        a = a / (tl.sum(a, axis=1, keep_dims=True) + eps)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    for k in range(1, iterations):
        i = iterations - k
        a = tl.load(saved_ptr + 2 * i * plane + at, mask=inside, other=1.0)
        total = tl.sum(a, axis=1, keep_dims=True) + eps
        grad = (grad - tl.sum(grad * a, axis=1, keep_dims=True) / total) / total
        a = tl.load(saved_ptr + (2 * i - 1) * plane + at, mask=inside, other=1.0)
        total = tl.sum(a, axis=2, keep_dims=True) + eps
        grad = (grad - tl.sum(grad * a, axis=2, keep_dims=True) / total) / total
    a = tl.load(saved_ptr + at, mask=inside, other=1.0)
    total = tl.sum(a, axis=1, keep_dims=True) + eps
    grad = (grad - tl.sum(grad * a, axis=1, keep_dims=True) / total) / total
    grad = soft * (grad - tl.sum(grad * soft, axis=2, keep_dims=True))
    tl.store(dx_ptr + at, grad, mask=inside)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, iterations: int, eps: float) -> Tensor:
        x = x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // 16
        _forward[(triton.cdiv(rows, _ROWS),)](x, y, rows, iterations, eps, _ROWS)
        ctx.save_for_backward(x)
        ctx.passes = (iterations, eps)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        iterations, eps = ctx.passes
        dx, rows = torch.empty_like(x), x.numel() // 16
        saved = x.new_empty(2 * iterations, *x.shape)
        grid = (triton.cdiv(rows, _ROWS),)
        _backward[grid](x, grad.contiguous(), dx, saved, rows, iterations, eps, _ROWS)
        return dx, None, None


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic [..., 4, 4] of FP32 scores on a GPU, differentiable."""
    return _Sinkhorn.apply(scores, iterations, eps)
