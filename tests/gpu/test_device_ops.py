"""Quantisers and top-k give on a GPU, bit for bit, what they give on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.ops.quantize import (
    dequantize_e2m1,
    dequantize_e4m3_blocks,
    qdq_e2m1,
    qdq_e4m3,
    quantize_e2m1,
    quantize_e4m3,
)
from dsv4.ops.topk import topk_stable

pytestmark = [pytest.mark.gpu, pytest.mark.stage("op")]


def values(dtype: torch.dtype) -> Tensor:
    """[64, 1024] of every magnitude, half of them on the edge between two codes, and zeros."""
    x = torch.randn(64, 1024) * torch.logspace(-20, 20, 64)[:, None]
    x[::2] = (x[::2] * 16).round() / 16
    x[:, ::100] = 0.0
    x[0] = 0.0
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.cpu().view(size[x.element_size()])


def compare(function: Callable[..., Tensor | tuple[Tensor, ...]], *tensors: Tensor) -> None:
    here, there = function(*tensors), function(*(tensor.cuda() for tensor in tensors))
    if isinstance(here, Tensor):
        here, there = (here,), (there,)
    for one, other in zip(here, there, strict=True):
        assert other.is_cuda
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_quantisers(seed, block, dtype) -> None:
    x = values(dtype)
    for function in (qdq_e4m3, quantize_e4m3, qdq_e2m1, quantize_e2m1):
        compare(lambda x, function=function: function(x, block), x)


def test_dequantisers(seed) -> None:
    x = values(torch.float32)
    compare(dequantize_e2m1, *quantize_e2m1(x))
    codes, _ = quantize_e4m3(x, 128)
    scale = torch.randint(100, 150, (1, 8), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    compare(lambda weight, scale: dequantize_e4m3_blocks(weight, scale), codes, scale)


def test_top_k_and_its_ties(seed) -> None:
    scores = torch.randint(-3, 4, (5, 7, 600)).float()
    scores[..., ::5] *= torch.randn(scores[..., ::5].shape)
    valid = torch.rand(scores.shape) > 0.3
    compare(lambda scores, valid: topk_stable(scores, 64, valid), scores, valid)
