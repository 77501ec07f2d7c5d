"""Calls of vLLM's CuTeDSL kernels for DeepSeek-V4, beside PyTorch: `vllm_cases.py CASE`."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch

torch.manual_seed(0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DIM, ROPE, GROUP = 512, 64, 64  # of an entry of the cache: elements, rotated ones, those of a scale


def _without_extension() -> None:
    """Let the Python files of vllm.vllm_flash_attn be imported without its GPU library."""
    package = types.ModuleType("vllm.vllm_flash_attn")
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    package.__path__ = [str(vllm / "vllm_flash_attn")]
    sys.modules[package.__name__] = package


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=dtype)


def _compare(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < bound, f"relative error {error:.1e}"


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, ..., d] in fp32, its last elements turned in pairs; cos_sin [T, rope]."""
    x = x.float().clone()
    cos, sin = (part.float() for part in cos_sin.chunk(2, -1))
    while cos.dim() < x.dim():
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., -ROPE::2].clone(), x[..., 1 - ROPE :: 2].clone()
    x[..., -ROPE::2] = even * cos - odd * sin
    x[..., 1 - ROPE :: 2] = odd * cos + even * sin
    return x


def _entries(cache: torch.Tensor, block: int, size: int) -> torch.Tensor:
    """Entries of a page [size, 584], all data ahead of all scales, in fp32."""
    page = cache[block].reshape(-1)
    data = page[: size * 576].view(size, 576)
    scales = page[size * 576 :].view(size, 8)[:, :7]
    codes = data[:, : DIM - ROPE].contiguous().view(torch.float8_e4m3fn).float()
    codes *= torch.exp2(scales.float() - 127).repeat_interleave(GROUP, 1)
    return torch.cat((codes, data[:, DIM - ROPE :].contiguous().view(torch.bfloat16).float()), 1)


def gather_fp8_entries() -> None:
    from vllm.models.deepseek_v4.nvidia.ops import dequant_gather_k_cutedsl as module

    size, offset = 64, 5
    lengths, gathered = _ints([19, 8, 130]), _ints([6, 8, 70])
    table = _ints([[3, -1000, -1000], [0, -1000, -1000], [4, 1, 2]])
    cache = torch.empty(5, size, 584, device="cuda", dtype=torch.uint8)
    flat = cache.view(5, -1)
    flat[:, : size * 576].copy_(torch.randint(0, 256, (5, size * 576), dtype=torch.uint8))
    data = flat[:, : size * 576].view(5, size, 576)
    data[..., : DIM - ROPE].copy_(
        torch.randn(5, size, DIM - ROPE).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    data[..., DIM - ROPE :].copy_(torch.randn(5, size, ROPE).bfloat16().view(torch.uint8))
    flat[:, size * 576 :].copy_(torch.randint(120, 135, (5, size * 8), dtype=torch.uint8))
    out = torch.full((3, offset + 73, DIM), 7.0, device="cuda", dtype=torch.bfloat16)
    expected = out.clone()
    for request in range(3):
        for i in range(int(gathered[request])):
            place = int(lengths[request] - gathered[request]) + i
            page = _entries(cache, int(table[request, place // size]), size)
            expected[request, offset + i] = page[place % size].bfloat16()
    module._DEQUANT_GATHER_K_CACHE_CUTEDSL_KERNEL(
        out=out, k_cache=cache, seq_lens=lengths, gather_lens=gathered, block_table=table,
        block_size=size, offset=offset,
    )  # fmt: skip
    assert torch.equal(out.cpu(), expected.cpu()), "other entries"


def _query(heads: int = 32, tokens: int = 5, width: int = 128) -> dict[str, torch.Tensor | float]:
    return {
        "positions": _ints([3, 0, 99, 17, 64], torch.int64)[:tokens],
        "q": _tensor(tokens, heads, width),
        "cos_sin_cache": _tensor(100, ROPE, dtype=torch.float32),
        "weights": _tensor(tokens, heads),
        "weights_softmax_scale": 128**-0.5,
        "weights_head_scale": 0.125,
        "weights_out": torch.empty(tokens, heads, device="cuda"),
    }


def indexer_query_fp8() -> None:
    _without_extension()
    from vllm.models.deepseek_v4.nvidia.ops import fused_indexer_q_cutedsl as module

    given = _query()
    rotated = _rotated(given["q"], given["cos_sin_cache"][given["positions"]]).bfloat16().float()
    codes = torch.empty(given["q"].shape, device="cuda", dtype=torch.float8_e4m3fn)
    module._INDEXER_Q_FP8_KERNEL(**given, q_fp8=codes)
    scale = torch.exp2((rotated.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil())
    _compare(codes.float() * scale[..., None], rotated, 0.04)
    factor = given["weights_softmax_scale"] * given["weights_head_scale"]
    _compare(given["weights_out"], given["weights"].float() * scale * factor, 1e-6)


def indexer_query_mxfp4() -> None:
    _without_extension()
    from vllm.models.deepseek_v4.nvidia.ops import fused_indexer_q_cutedsl as module

    given = _query()
    rotated = _rotated(given["q"], given["cos_sin_cache"][given["positions"]])
    tokens, heads, width = given["q"].shape
    codes = torch.empty(tokens, heads, width // 2, device="cuda", dtype=torch.uint8)
    scales = torch.empty(tokens, heads, width // 32, device="cuda", dtype=torch.uint8)
    module._INDEXER_Q_MXFP4_KERNEL(**given, q_packed=codes, q_scale=scales)
    pairs = torch.stack((codes & 15, codes >> 4), -1).reshape(tokens, heads, width).long()
    values = torch.where(pairs < 8, 1.0, -1.0) * E2M1[pairs & 7]
    found = values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    _compare(found, rotated, 0.17)
    factor = given["weights_softmax_scale"] * given["weights_head_scale"]
    _compare(given["weights_out"], given["weights"].float() * factor, 1e-6)


def compress_4() -> None:
    """Eight positions, the newer halves of four and the older halves of four before them, become
    an entry: softmax over the positions, norm, RoPE, FP8."""
    from vllm.models.deepseek_v4.nvidia.ops import sparse_attn_compress_cutedsl as module

    tokens, size, page = 12, 4, 64
    # A row of the state: values of both halves, then scores of both halves.
    state = _tensor(4, size, 4 * DIM, dtype=torch.float32)
    table = _ints([[2, 0, 3]])
    positions = torch.arange(tokens, device="cuda")
    slots = table[0].long().repeat_interleave(size) * size + positions % size
    weight, cos_sin = _tensor(DIM), _tensor(16, ROPE, dtype=torch.float32)
    cache = torch.zeros(2, page, 584, device="cuda", dtype=torch.uint8)
    entries = _ints([page + p // 4 if p % 4 == 3 else -1 for p in range(tokens)], torch.int64)
    module.fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(
        state, torch.zeros(tokens, device="cuda", dtype=torch.int32), positions, slots, table,
        size, weight, 1e-6, cos_sin, cache, entries, page, cache.stride(0),
    )  # fmt: skip
    rows = state.view(-1, 4 * DIM)[slots].cpu()
    found = _entries(cache, 1, page)
    for entry in range(tokens // 4):
        newer = rows[4 * entry : 4 * entry + 4]
        older = rows[4 * entry - 4 : 4 * entry] if entry else rows[:0]
        values = torch.cat((older[:, :DIM], newer[:, DIM : 2 * DIM]))
        scores = torch.cat((older[:, 2 * DIM : 3 * DIM], newer[:, 3 * DIM :]))
        pooled = (values * torch.softmax(scores, 0)).sum(0)
        normed = torch.nn.functional.rms_norm(pooled, (DIM,), weight.cpu().float(), 1e-6)
        at = cos_sin[4 * entry : 4 * entry + 1].cpu()
        _compare(found[entry], _rotated(normed[None], at)[0], 0.04)


def router() -> None:
    from vllm.model_executor.layers.fused_moe.router.bf16x3_router_gemm_cutedsl import (
        bf16x3_router_gemm,
    )

    x, w = _tensor(48, 512), 0.053 * _tensor(128, 512, dtype=torch.float32)
    _compare(bf16x3_router_gemm(x, w), x.double() @ w.double().T, 1e-5)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
