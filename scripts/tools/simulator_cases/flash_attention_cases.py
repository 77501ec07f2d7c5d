"""Calls of FlashAttention-4, beside PyTorch: `flash_attention_cases.py CASE`."""

from __future__ import annotations

import sys

import torch
from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

torch.manual_seed(0)


def _tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]


def _attention(q, k, v, causal: bool = False, window: int | None = None, sink=None):
    """In float32: q [B, Sq, H, D], k and v [B, Sk, Hk, D]."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    rows, columns = scores.shape[-2:]
    last = torch.arange(rows)[:, None] + columns - rows
    column = torch.arange(columns)
    if causal or window is not None:
        scores = scores.masked_fill(column > last, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(column < last - window, -torch.inf)
    if sink is not None:
        extra = sink.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        return (torch.softmax(torch.cat((scores, extra), -1), -1)[..., :-1] @ v).transpose(1, 2)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def _compare(found, expected: torch.Tensor) -> None:
    found = found[0] if isinstance(found, tuple) else found
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < 1e-2, f"relative error {error:.1e}"


def forward() -> None:
    q, k, v = _tensors((1, 128, 2, 64), (1, 256, 2, 64), (1, 256, 2, 64))
    _compare(flash_attn_func(q, k, v), _attention(q, k, v))


def causal() -> None:
    q, k, v = _tensors((1, 256, 2, 128), (1, 256, 1, 128), (1, 256, 1, 128))
    _compare(flash_attn_func(q, k, v, causal=True), _attention(q, k, v, causal=True))


def grouped_queries() -> None:
    q, k, v = _tensors((2, 64, 4, 128), (2, 200, 2, 128), (2, 200, 2, 128), dtype=torch.float16)
    _compare(flash_attn_func(q, k, v), _attention(q, k, v))


def window() -> None:
    q, k, v = _tensors((1, 200, 1, 128), (1, 300, 1, 128), (1, 300, 1, 128))
    found = flash_attn_func(q, k, v, causal=True, window_size=(64, 0))
    _compare(found, _attention(q, k, v, window=64))


def sink() -> None:
    q, k, v = _tensors((1, 128, 4, 64), (1, 128, 4, 64), (1, 128, 4, 64))
    (weights,) = _tensors((4,))
    found = flash_attn_func(q, k, v, causal=True, learnable_sink=weights)
    _compare(found, _attention(q, k, v, causal=True, sink=weights))


def ragged() -> None:
    lengths = (100, 30, 130)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda", dtype=torch.int32)
    q, k, v = _tensors((260, 2, 128), (260, 2, 128), (260, 2, 128))
    found = flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    parts = zip(*(x.split(lengths) for x in (q, k, v)))
    expected = [_attention(*(x[None] for x in part), causal=True)[0] for part in parts]
    _compare(found, torch.cat(expected))


def backward() -> None:
    shape = (1, 128, 1, 64)
    q, k, v, gradient = _tensors(shape, shape, shape, shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = flash_attn_func(*leaves)
    (found[0] if isinstance(found, tuple) else found).backward(gradient)
    references = [x.detach().float().requires_grad_() for x in leaves]
    _attention(*references).backward(gradient.float())
    for leaf, reference in zip(leaves, references):
        _compare(leaf.grad, reference.grad)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
