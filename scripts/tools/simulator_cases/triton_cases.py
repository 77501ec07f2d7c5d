"""Kernels in Triton, compiled by it, beside PyTorch: `triton_cases.py CASE`."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

torch.manual_seed(0)
WARPS = 8 if torch.cuda.get_device_capability()[0] == 9 else 4


@triton.jit
def _softmax(x, y, n, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at = tl.program_id(0) * n + columns
    values = tl.load(x + at, mask=columns < n, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(y + at, weights / tl.sum(weights, 0), mask=columns < n)


@triton.jit
def _gemm(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + (k + depth)[None, :])
        right = tl.load(b + (k + depth)[:, None] * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


@triton.jit
def _gemm_tma(
    a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPECIALISED: tl.constexpr
):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=SPECIALISED):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    c.store([row, column], total.to(tl.float16))


@triton.jit
def _attention(q, k, v, o, n, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows, width = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + rows[:, None] * D + width[None, :])
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        columns = start + tl.arange(0, BN)
        keys = tl.load(k + columns[None, :] * D + width[:, None])
        scores = tl.dot(query, keys) * scale
        newest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - newest[:, None])
        kept = tl.exp(top - newest)
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(v + columns[:, None] * D + width[None, :])
        out = tl.dot(weights.to(tl.float16), values, out * kept[:, None])
        top = newest
    tl.store(o + rows[:, None] * D + width[None, :], (out / total[:, None]).to(tl.float16))


def _halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def softmax() -> None:
    x = torch.randn(8, 1000, device="cuda")
    y = torch.empty_like(x)
    _softmax[(8,)](x, y, 1000, BLOCK=1024)
    torch.testing.assert_close(y, torch.softmax(x, -1))


def gemm() -> None:
    a, b, c = _halves(256, 192), _halves(192, 256), torch.empty(256, 256, device="cuda")
    _gemm[(2, 2)](a, b, c, 256, 192, BM=128, BN=128, BK=64, num_warps=WARPS, num_stages=3)
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-3, rtol=1e-3)


def _tma(specialised: bool) -> None:
    a, b, c = _halves(256, 192), _halves(256, 192), _halves(256, 256)
    described = (
        TensorDescriptor.from_tensor(tensor, list(box))
        for tensor, box in ((a, (128, 64)), (b, (128, 64)), (c, (128, 128)))
    )
    _gemm_tma[(2, 2)](
        *described, 192, BM=128, BN=128, BK=64, SPECIALISED=specialised, num_warps=WARPS,
        num_stages=3,
    )  # fmt: skip
    torch.testing.assert_close(c.float(), a.float() @ b.float().T, atol=2e-2, rtol=2e-3)


def gemm_tma() -> None:
    _tma(specialised=False)


def gemm_specialised() -> None:
    _tma(specialised=True)


def attention() -> None:
    q, k, v = _halves(128, 64), _halves(256, 64), _halves(256, 64)
    o = torch.empty_like(q)
    _attention[(1,)](q, k, v, o, 256, 0.125, D=64, BM=128, BN=64, num_warps=WARPS)
    weights = torch.softmax(q.float() @ k.float().T * 0.125, -1)
    torch.testing.assert_close(o.float(), weights @ v.float(), atol=2e-3, rtol=1e-2)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
