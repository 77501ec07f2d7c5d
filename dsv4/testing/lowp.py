"""Quantised attention under test: cases, inputs of several kinds, the oracle, and its metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.lowp.config import SMOOTH_Q_ROWS, QuantizedAttentionConfig
from dsv4.ops.quantized_attention.op import quantized_attention
from dsv4.ops.quantized_attention.quantizers import out_of_v_order
from dsv4.reference.lowp_attention import LOG2E, attend, exact_attention, seen_keys
from dsv4.reference.lowp_quantizers import (
    key_group,
    quantize_fp4,
    quantize_rows,
    quantize_values,
    query_group,
)
from dsv4.reference.lowp_sums import Sum, exact_sum


@dataclass(frozen=True)
class Metrics:
    """Distance of an output from its oracle, in SageAttention's terms: over whole tensors.

    Attributes:
        cosine: of both, flattened.
        l1: sum of |difference| over the sum of |oracle|.
        rmse: root of the mean square of the difference.
    """

    cosine: float
    l1: float
    rmse: float

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Metrics:
        """Compare two tensors of one shape."""
        got, wanted = actual.double().flatten(), expected.double().flatten()
        assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} elements are not finite"
        off = got - wanted
        cosine = float(got @ wanted / (got.norm() * wanted.norm()))
        l1, rmse = float(off.abs().sum() / wanted.abs().sum()), float(off.square().mean().sqrt())
        return cls(cosine, l1, rmse)

    def __str__(self) -> str:
        return f"cosine {self.cosine:.6f}, L1 {self.l1:.5f}, RMSE {self.rmse:.2e}"


@dataclass(frozen=True)
class Case:
    """Sizes of a call, kind of its inputs, options of `quantized_attention`.

    Attributes:
        batch, heads, key_heads, queries, keys, dim: sizes.
        kind: "normal", "qbias", "kbias", "vbias", "outlier", "zeros" (channels and rows of zeros).
        options: keywords of the call.
    """

    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    queries: int = 64
    keys: int = 64
    dim: int = 64
    kind: str = "normal"
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.heads // self.key_heads


def make_inputs(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, L, d], k and v [B, Hk, S, d] of a case."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = normal(case.batch, case.heads, case.queries, case.dim)
    k, v = (normal(case.batch, case.key_heads, case.keys, case.dim) for _ in range(2))
    per_head = (case.batch, case.key_heads, 1, case.dim)
    if case.kind == "qbias":
        q += 3 * normal(case.batch, case.heads, 1, case.dim)
    elif case.kind == "kbias":
        k += 8 * normal(*per_head)
    elif case.kind == "vbias":
        v += 3 * normal(*per_head)
    elif case.kind == "outlier":
        q[..., 3] *= 20
        k[..., 5] = k[..., 5] * 20 + 40
    elif case.kind == "zeros":
        v[..., 1::3], k[..., ::5, :], q[..., 1::4, :] = 0, 0, 0
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


def expected(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention on what is given, before any rounding: out [B, Hq, L, d] and lse."""
    causal = case.options.get("causal_align") or "top_left"
    seen = None
    if case.options.get("is_causal"):
        seen = seen_keys(q.shape[2], k.shape[2], causal)
    added = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = attn_mask if seen is None else seen & attn_mask
    elif attn_mask is not None:
        added = attn_mask
    keys, values = (x.repeat_interleave(case.group, 1) for x in (k, v))
    scale = case.options.get("sm_scale") or case.dim**-0.5
    return exact_attention(q, keys, values, scale, seen, added)


def oracle(
    config: QuantizedAttentionConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mma: Sum = exact_sum,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference's quantised attention, head by head, quantisers included.

    Returns: out [B, Hq, L, d] float32, and lse [B, Hq, L].
    """
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for batch in range(len(q)):
        for head in range(q.shape[1]):
            of = (batch, head // group)
            out, lse = _head(config, q[batch, head], k[of], v[of], mma, seen)
            outs.append(out)
            lses.append(lse)
    shape = q.shape[:2]
    return torch.stack(outs).unflatten(0, shape).float(), torch.stack(lses).unflatten(0, shape)


def _head(
    config: QuantizedAttentionConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mma: Sum,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One head of `oracle`."""
    keys, mean = k.float(), torch.zeros(k.shape[1])
    if config.smooth_k:
        mean = (keys.sum(0) / len(keys)).to(k.dtype).float()
        keys = keys - mean
        keys = keys if config.quantizer == "cuda" else keys.to(k.dtype).float()
    factor = config.sm_scale * LOG2E
    means = _query_means(config, q)
    queries = (q.float() - means) * (factor if config.folds_scale else 1.0)
    if config.qk == "nvfp4":
        (a, a_scale), (b, b_scale) = (
            quantize_fp4(torch.nn.functional.pad(x, (0, -x.shape[1] % 16))) for x in (queries, keys)
        )
        scores = _decoded(a, a_scale) @ _decoded(b, b_scale).T * factor
    else:
        granularity, geometry = config.qk_quant_gran, config.geometry
        if geometry == "sm89" and config.pv_accum_dtype == "fp16+fp32" and len(mean) > 64:
            geometry = "sm89, fp16"
        rule = "fp8" if config.qk == "fp8" else config.quantizer
        rule += "_block" if rule == "triton" and config.folds_scale else ""
        of_q = [query_group(granularity, row, geometry) for row in range(len(q))]
        of_k = [key_group(granularity, row, geometry) for row in range(len(k))]
        a, a_scale = quantize_rows(queries, of_q, rule)
        b, b_scale = quantize_rows(keys, of_k, rule)
        product = mma(torch.zeros(len(a), len(b)), a, b.T) if config.qk == "fp8" else a @ b.T
        scores = product.double() * a_scale.double()[:, None] * b_scale.double()
        scores = scores if config.folds_scale else scores * factor
    scores = scores + means.double() @ keys.to(k.dtype).double().T * factor
    if config.causal != "none":
        limit = seen_keys(len(q), len(k), config.causal)
        seen = limit if seen is None else seen & limit
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    values, scale, v_mean = _values(config, v)
    tile = config.tiles.block_k
    sums = {"tile": tile, "pv": config.pv, "accumulation": config.pv_accum_dtype, "mma": mma}
    out, top, total = attend(scores, values, **sums)
    has_keys = total > 0
    out = torch.where(has_keys, out * scale + v_mean, 0.0)
    lse = ((torch.log2(total) + top) / LOG2E)[:, 0] + (q.double() @ mean.double()) * config.sm_scale
    return out[:, : v.shape[1]], torch.where(has_keys[:, 0], lse, -math.inf)


def _query_means(config: QuantizedAttentionConfig, q: Tensor) -> Tensor:
    """What is taken off each query of a head [L, d]: the mean of its 128, in their dtype."""
    if not config.smooth_q:
        return torch.zeros_like(q, dtype=torch.float32)
    blocks = q.float().split(SMOOTH_Q_ROWS)
    return torch.cat([x.mean(0).to(q.dtype).float().expand_as(x) for x in blocks])


def _decoded(values: Tensor, scale: Tensor) -> Tensor:
    return (values.unflatten(-1, (-1, 16)) * scale[..., None]).flatten(-2).double()


def _values(config: QuantizedAttentionConfig, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the codes [S, d], and each channel's scale and mean."""
    wide, zeros = v.float(), torch.zeros(v.shape[1])
    if config.pv == "fp8":
        return quantize_values(wide, config.v_max, config.smooth_v)
    if config.pv == "fp16":
        mean = wide.sum(0) / len(wide) if config.smooth_v else zeros
        return (wide - mean).half().float(), zeros + 1, mean
    padded = torch.nn.functional.pad(wide.T, (0, -len(wide) % 16))
    codes, scale = quantize_fp4(padded)
    return _decoded(codes, scale).T[: len(v)].float(), zeros + 1, zeros


def run(case: Case, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """out and lse of `quantized_attention` with a case's options."""
    return quantized_attention(q, k, v, return_lse=True, **case.options, **more)


def official_values(v_codes: Tensor) -> Tensor:
    """FP8 values as SageAttention stores them [b, Hk, d, S'], of our tiles [b, Hk, tiles, d, n]."""
    return v_codes.transpose(2, 3).flatten(3)


def tokens_of(v_codes: Tensor) -> Tensor:
    """FP8 values in the order of keys [b, Hk, S', d] float32, of tiles."""
    rows = v_codes.view(torch.uint8).transpose(-1, -2).flatten(-3, -2)
    return out_of_v_order(rows).view(torch.float8_e4m3fn).float()
