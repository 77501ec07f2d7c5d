"""Calls of FlashInfer's CuTeDSL kernels, beside PyTorch: `flashinfer_cases.py CASE`."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

torch.manual_seed(0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _compare(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-2) -> None:
    error = (found.float() - expected).norm() / expected.norm()
    assert error < bound, f"relative error {error:.1e}"


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), 1e-6)


def _decoded(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Values of packed e2m1 codes, a scale for each `block` of them."""
    codes = codes.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1).long()
    values = torch.where(pairs < 8, 1.0, -1.0) * E2M1[pairs & 7]
    if scales.dtype == torch.uint8:  # exponents
        scales = torch.exp2(scales.float() - 127)
    return values * scales.float().repeat_interleave(block, -1)


def rmsnorm() -> None:
    from flashinfer.norm import rmsnorm

    x, weight = _tensor(8, 2048), _tensor(2048)
    _compare(rmsnorm(x, weight), _norm(x, weight))


def add_rmsnorm() -> None:
    from flashinfer.norm import fused_add_rmsnorm

    x, residual, weight = _tensor(8, 2048), _tensor(8, 2048), _tensor(2048)
    total = x.float() + residual.float()
    fused_add_rmsnorm(x, residual, weight)
    _compare(residual, total)
    _compare(x, _norm(total, weight))


def layernorm() -> None:
    from flashinfer.norm import layernorm

    x = _tensor(8, 1024)
    weight, bias = (_tensor(1024, dtype=torch.float32) for _ in range(2))
    expected = functional.layer_norm(x.float(), (1024,), weight, bias, 1e-6)
    _compare(layernorm(x, weight, bias), expected)


def rmsnorm_nvfp4() -> None:
    from flashinfer.cute_dsl.rmsnorm_fp4quant import rmsnorm_fp4quant

    x, weight = _tensor(8, 1024), _tensor(1024)
    _compare(_decoded(*rmsnorm_fp4quant(x, weight), 16), _norm(x, weight), 0.12)


def rmsnorm_mxfp4() -> None:
    from flashinfer.cute_dsl.rmsnorm_fp4quant import rmsnorm_fp4quant

    x, weight = _tensor(8, 1024), _tensor(1024)
    found = rmsnorm_fp4quant(x, weight, block_size=32)
    _compare(_decoded(*found, 32), _norm(x, weight), 0.17)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
