"""Attention of one head over quantised operands, tile by tile, and exact attention beside it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.reference.lowp_sums import FP16_KEYS, HOPPER_KEYS, Sum, exact_sum, fp16_sum
from dsv4.reference.quantize import E2M1_MAX, round_e2m1, round_e4m3

LOG2E = 1.44269504
#: log2 of the largest weight, by the format of weights and values.
P_OFFSETS = {"fp8": 8.807, "fp16": 0.0, "nvfp4": 11.392317}
#: Keys after which an fp16 accumulator of FP8 products is emptied.
FLUSH_KEYS = 64


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64.

    Args:
        q, k, v: [..., L, d], [..., S, d], [..., S, d].
        scale: factor on q . k.
        seen: [..., L, S] bool.
        added: [..., L, S], to scaled scores.

    Returns:
        out [..., L, d] and lse [..., L]; 0 and -inf of a row that sees no key.
    """
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if added is not None:
        scores = scores + added.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return weights @ v.double(), lse


def seen_keys(queries: int, keys: int, causal: str) -> Tensor:
    """[L, S] bool of a causal mask: "none", "top_left" or "bottom_right"."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal == "none":
        return seen
    return seen.tril(0 if causal == "top_left" else keys - queries)


def attend(
    scores: Tensor,
    v: Tensor,
    *,
    tile: int,
    pv: str,
    accumulation: str,
    mma: Sum = exact_sum,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh the values of one head by scores, in tiles of keys.

    Args:
        scores: [L, S] float64 in units of log2, -inf where a query sees no key.
        v: [S, d] values of codes.
        tile: keys of a tile.
        pv: format of the weights: "fp8", "fp16", "nvfp4".
        accumulation: "fp32" (the accumulator holds the sum of all tiles), "fp32+fp32" (one for each
            tile, added in float32), "fp32+fp16" (an fp16 one for 64 keys), "fp16", "fp16+fp32".
        mma: sum of FP8 products with a float32 accumulator.

    Returns:
        out [L, d] in units of the codes, row maxima less their offset [L, 1], row sums [L, 1].
    """
    rows, dim = len(scores), v.shape[1]
    o, total = torch.zeros(rows, dim), torch.zeros(rows, 1, dtype=torch.float64)
    top = torch.full((rows, 1), -math.inf, dtype=torch.float64)
    for begin in range(0, scores.shape[1], tile):
        part, values = scores[:, begin : begin + tile], v[begin : begin + tile]
        raised = torch.maximum(top, part.amax(1, keepdim=True) - P_OFFSETS[pv])
        base = torch.where(raised == -math.inf, 0.0, raised)
        p, decay = torch.exp2(part - base), torch.exp2(top - base)
        top, total = raised, total * decay + p.sum(1, keepdim=True)
        o = _add((o * decay).float(), _round(p, pv), values, accumulation, mma)
    return torch.where(total > 0, o / total, 0.0), top, total


def _round(p: Tensor, pv: str) -> Tensor:
    """Weights in their format, as float32."""
    if pv == "fp8":
        return round_e4m3(p)
    if pv == "fp16":
        return p.half().float()
    padded = torch.nn.functional.pad(p.float(), (0, -p.shape[1] % 16)).unflatten(1, (-1, 16))
    scale = padded.amax(2, keepdim=True) / E2M1_MAX
    codes = round_e2m1(torch.where(scale > 0, padded / scale, 0.0))
    return (codes * round_e4m3(scale)).flatten(1)[:, : p.shape[1]]


def _add(o: Tensor, p: Tensor, v: Tensor, accumulation: str, mma: Sum) -> Tensor:
    """The sum so far with the weighted values of a tile."""
    empty = torch.zeros_like(o)
    if accumulation == "fp32":
        return mma(o, p, v)
    if accumulation == "fp32+fp32":
        return o + mma(empty, p, v)
    if accumulation == "fp16":
        return fp16_sum(FP16_KEYS)(o.half().float(), p, v)
    if accumulation == "fp16+fp32":
        return o + fp16_sum(FP16_KEYS)(empty, p, v)
    for begin in range(0, len(v), FLUSH_KEYS):
        keys = slice(begin, begin + FLUSH_KEYS)
        o = o + fp16_sum(HOPPER_KEYS)(empty, p[:, keys], v[keys])
    return o
