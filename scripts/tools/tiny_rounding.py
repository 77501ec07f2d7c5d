"""Roundings of weights and activations that training passes gradients straight through."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsv4.loader import TensorSpec
from dsv4.reference.quantize import E4M3_AMAX_FLOOR, E4M3_MAX, ceil_log2, exp2_int
from dsv4.reference.weights import fake_quantize_fp4, fake_quantize_fp8


def _as_if(x: Tensor, y: Tensor) -> Tensor:
    """`y`, differentiated as if it were `x`; exact, since x - x is 0."""
    return y.detach() + (x - x.detach())


class _RoundE4m3(torch.autograd.Function):
    """`fake_quantize_e4m3` by a cast; gradients pass straight through."""

    @staticmethod
    def forward(ctx, x: Tensor, block: int) -> Tensor:
        groups = x.unflatten(-1, (-1, block))
        amax = torch.linalg.vector_norm(groups, torch.inf, dim=-1, keepdim=True)
        scale = exp2_int(ceil_log2(amax.clamp(min=E4M3_AMAX_FLOOR) * (1 / E4M3_MAX)))
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_e4m3(x: Tensor, block: int = 128) -> Tensor:
    """x as e4m3 with a power-of-two scale per `block` of the last dimension holds it, FP32."""
    return _RoundE4m3.apply(x, block)


def rounded(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Every weight as its file will hold it; gradients pass straight through the rounding.

    Weights of one format are rounded together: a format's tiles lie in one tensor meanwhile.

    Args:
        tensors: FP32 weights, experts stacked; both sizes of FP8 ones multiples of 128.
        specs: stored dtype of each.
    """
    formats: dict[torch.dtype, tuple[tuple[int, int], Callable[[Tensor], Tensor]]] = {
        torch.float8_e4m3fn: ((128, 128), fake_quantize_fp8),
        torch.int8: ((1, 32), fake_quantize_fp4),
        torch.bfloat16: ((1, 1), lambda x: x.bfloat16().float()),
    }
    out = dict(tensors)
    for dtype, ((rows, columns), quantize) in formats.items():
        names = [name for name in tensors if specs[name].dtype == dtype]
        grids = [
            tensors[name].reshape(-1, rows, tensors[name].shape[-1] // columns, columns)
            for name in names
        ]
        tiles = torch.cat([grid.transpose(1, 2).reshape(-1, rows, columns) for grid in grids])
        tiles = _as_if(tiles, quantize(tiles.detach()))
        pieces = tiles.split([grid.numel() // (rows * columns) for grid in grids])
        for name, grid, piece in zip(names, grids, pieces):
            there = piece.view(grid.shape[0], grid.shape[2], rows, columns).transpose(1, 2)
            out[name] = there.reshape(tensors[name].shape)
    return out
