"""Attention over codes in torch: the CPU backend, other GPUs, the readable form of the kernels.

It goes over the keys in the kernels' tiles, since weights are rounded beside the running maximum of
the tiles so far. Products of codes are exact and their sums over a tile rounded once, so that no
bit depends on the batch. The tensor cores' narrower sums are `pv_accum_dtype`'s matter: here
"fp32+fp32" and "fp32" are one sum, and fp16 accumulators are rounded as often as in hardware.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.lowp.config import (
    FP16_FLUSH_KEYS,
    LOG2E,
    P_OFFSET,
    SMOOTH_Q_ROWS,
    QuantizedAttentionConfig,
)
from dsv4.kernels.lowp.groups import FP4_BLOCK
from dsv4.ops.quantize import E2M1_MAX, decode_e4m3
from dsv4.ops.quantized_attention import quantizers as q8
from dsv4.ops.quantized_attention.codes import (
    Codes,
    decode_keys,
    decode_queries,
    decode_values,
    encode_queries,
)

FP8_KEYS, FP16_KEYS = 32, 16  # that one matrix instruction sums over


# Stages that each tile of keys has a part of: the dimension of the parts.
_OF_TILES = {"s_raw": -1, "s": -1, "p": -1, "p_codes": -1, "m": -1, "d": -1, "o_tile": 2}


class Heads(NamedTuple):
    """Queries' and keys' decoded codes, with a head of keys for each head of queries.

    Attributes:
        q, k: [b, Hq, L, dp], [b, Hq, S, dp] values of codes.
        q_scale, k_scale: [b, Hq, L], [b, Hq, S]; of queries with the softmax scale and log2(e).
        v: [b, Hq, S', dp] values of codes.
        added: [b, Hq, L, S] in units of log2, what the means of the queries and a float mask add;
            or None.
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    added: Tensor | None


class Running(NamedTuple):
    """State of the online softmax: sum of weighted values [b, Hq, L, dp], row maximum less the
    offset and row sum [b, Hq, L, 1]."""

    o: Tensor
    top: Tensor
    total: Tensor


def attend(
    config: QuantizedAttentionConfig,
    q: Tensor,
    codes: Codes,
    attn_mask: Tensor | None = None,
    stages: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one batch.

    Args:
        q: [b, Hq, L, d].
        codes: of keys and values, by the names of the operator's table.
        attn_mask: [b, Hq, L, S], uint8 or float32.
        stages: filled with what a kernel holds on the way, by the names of dumps.

    Returns:
        out [b, Hq, L, d] float32, and lse [b, Hq, L] float32: -inf where a row has no keys.
    """
    heads = _heads(config, q, codes, attn_mask, stages)
    seen = _seen(config, q.shape[-2], heads.k.shape[-2], attn_mask, q.device)
    tile = config.tiles.block_k
    state = Running(
        torch.zeros_like(heads.q),
        heads.q.new_full((*heads.q.shape[:-1], 1), -math.inf),
        heads.q.new_zeros((*heads.q.shape[:-1], 1)),
    )
    parts: dict[str, list[Tensor]] = {name: [] for name in _OF_TILES}
    for begin in range(0, heads.k.shape[-2], tile):
        keys = slice(begin, begin + tile)
        products = heads.q @ heads.k[..., keys, :].transpose(-1, -2)
        scores = _scores(heads, products, seen, keys, tile)
        weights, state = _weigh(config, scores, state)
        values = heads.v[..., keys, :]
        state = state._replace(o=_add_values(config, weights, values, state))
        if stages is not None:
            found = (
                products.to(torch.int32 if config.qk == "int8" else torch.float32), scores,
                weights.exact, weights.rounded, state.top, state.total,
                _product(weights.rounded, values).unsqueeze(2),
            )  # fmt: skip
            for name, part in zip(parts, found):
                parts[name].append(part)
    out, lse = _finish(config, q, codes, state)
    if stages is not None:
        stages |= {name: torch.cat(x, _OF_TILES[name]) for name, x in parts.items() if x}
        stages["o_sum"] = state.o
        stages |= {"o": out, "lse": lse}
    return out, lse


class Weights(NamedTuple):
    """Weights of a tile [b, Hq, L, n], what is left of them after rounding, and the factor on the
    sums so far [b, Hq, L, 1]."""

    exact: Tensor
    rounded: Tensor
    decay: Tensor


def _heads(
    config: QuantizedAttentionConfig,
    q: Tensor,
    codes: Codes,
    attn_mask: Tensor | None,
    stages: dict[str, Tensor] | None,
) -> Heads:
    q_codes, q_scale, q_mean = encode_queries(config, q)
    if stages is not None:
        stages |= {"q_codes": q_codes, "q_scale": q_scale, "q_mean": q_mean}
    values, per_query = decode_queries(config, q_codes, q_scale)
    keys, per_key = decode_keys(config, codes)
    if not config.folds_scale:
        per_query = per_query * (config.sm_scale * LOG2E)
    group = q.shape[1] // max(keys.shape[1], 1)
    keys, per_key, v = (
        x.repeat_interleave(group, 1) for x in (keys, per_key, decode_values(config, codes))
    )
    added = None
    if config.smooth_q:
        added = _delta(config, q_mean, codes["k_smooth"], q.shape[-2], group)
        if stages is not None:
            stages["delta_s"] = added
    if config.mask == "float":
        bias = attn_mask * LOG2E
        added = bias if added is None else added + bias
    if config.qk != "int8":
        # Products of int8 add up exactly in float32; those of floats do in float64.
        values, keys = values.double(), keys.double()
    return Heads(values, per_query, keys, per_key, v, added)


def _delta(
    config: QuantizedAttentionConfig, mean: Tensor, keys: Tensor, rows: int, group: int
) -> Tensor:
    """What the means of the queries add to their scores, in units of log2."""
    keys = keys.repeat_interleave(group, 1).double()
    delta = (mean.double() @ keys.transpose(-1, -2)).float() * (config.sm_scale * LOG2E)
    return delta.repeat_interleave(SMOOTH_Q_ROWS, -2)[..., :rows, :]


def _seen(
    config: QuantizedAttentionConfig,
    queries: int,
    keys: int,
    attn_mask: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """[L, S] or [b, Hq, L, S] bool: which keys a query sees; None for all."""
    seen = None
    if config.causal != "none":
        last = torch.arange(queries, device=device)
        last = last + (keys - queries if config.causal == "bottom_right" else 0)
        seen = torch.arange(keys, device=device) <= last[:, None]
    if config.mask == "bool":
        listed = attn_mask != 0
        seen = listed if seen is None else seen & listed
    return seen


def _scores(heads: Heads, products: Tensor, seen: Tensor | None, keys: slice, tile: int) -> Tensor:
    """Scores of a tile in units of log2, -inf where a query sees no key and past the last one.

    Args:
        products: of the codes of queries and of the tile's keys.
    """
    scores = products.float() * heads.q_scale.unsqueeze(-1) * heads.k_scale[..., None, keys]
    if heads.added is not None:
        scores = scores + heads.added[..., keys]
    if seen is not None:
        scores = scores.masked_fill(~seen[..., keys], -math.inf)
    return F.pad(scores, (0, tile - scores.shape[-1]), value=-math.inf)


def _weigh(
    config: QuantizedAttentionConfig, scores: Tensor, state: Running
) -> tuple[Weights, Running]:
    """Weights of a tile beside the running maximum, and the sums' state without its values."""
    highest = scores.amax(-1, keepdim=True) - P_OFFSET[config.pv]
    # NaN must stay NaN; fmax and torch.maximum differ in that.
    top = torch.maximum(state.top, highest)
    base = torch.where(top == -math.inf, 0.0, top)
    exact = torch.exp2(scores - base)
    # Few elements in float64: torch's float32 exp2 and log2 have other bits at a tensor's end.
    decay = torch.exp2((state.top - base).double()).float()
    added = exact.double().sum(-1, keepdim=True).float()
    total = state.total * decay + added
    return Weights(exact, _round_weights(config, exact), decay), Running(state.o, top, total)


def _round_weights(config: QuantizedAttentionConfig, weights: Tensor) -> Tensor:
    """Weights as the second product gets them."""
    if config.pv == "fp16":
        return weights.half().float()
    if config.pv == "fp8":
        return decode_e4m3(q8.round_e4m3(weights))
    blocks = weights.unflatten(-1, (-1, FP4_BLOCK))
    unrounded = blocks.amax(-1, keepdim=True) / E2M1_MAX
    inverse = torch.where(unrounded == 0, 0.0, unrounded.reciprocal())
    scale = decode_e4m3(q8.round_e4m3(unrounded))
    return (q8.decode_e2m1(q8.round_e2m1(blocks * inverse)) * scale).flatten(-2)


def _add_values(
    config: QuantizedAttentionConfig, weights: Weights, v: Tensor, state: Running
) -> Tensor:
    """Sum of weighted values with those of a tile."""
    p, decay, mode = weights.rounded, weights.decay, config.pv_accum_dtype
    if mode == "fp16":
        return _fp16_sum((state.o * decay).half(), p, v, FP16_KEYS)
    o = state.o * decay
    if mode == "fp16+fp32":
        return o + _fp16_sum(torch.zeros_like(o), p, v, FP16_KEYS)
    if mode == "fp32+fp16":
        for begin in range(0, v.shape[-2], FP16_FLUSH_KEYS):
            keys = slice(begin, begin + FP16_FLUSH_KEYS)
            o = o + _fp16_sum(torch.zeros_like(o), p[..., keys], v[..., keys, :], FP8_KEYS)
        return o
    return o + _product(p, v)


def _fp16_sum(start: Tensor, p: Tensor, v: Tensor, step: int) -> Tensor:
    """start + p v, rounded to fp16 after every `step` keys, as float32."""
    total = start.float()
    for begin in range(0, v.shape[-2], step):
        keys = slice(begin, begin + step)
        total = (total + _product(p[..., keys], v[..., keys, :])).half().float()
    return total


def _product(p: Tensor, v: Tensor) -> Tensor:
    """p v of values of codes, rounded once: in float64 the sum of a tile is exact."""
    return (p.double() @ v.double()).float()


def _finish(
    config: QuantizedAttentionConfig, q: Tensor, codes: Codes, state: Running
) -> tuple[Tensor, Tensor]:
    """Outputs and lse of the sums."""
    has_keys = state.total != 0
    out = state.o / torch.where(has_keys, state.total, 1.0)
    group = q.shape[1] // max(codes["k_codes"].shape[1], 1)

    def per_head(name: str) -> Tensor:
        return codes[name].float().repeat_interleave(group, 1).unsqueeze(-2)

    if config.pv == "fp8":
        out = out * per_head("v_scale")
    out = out[..., : config.head_dim]
    if config.smooth_v:
        out = out + per_head("vm")
    out = torch.where(has_keys, out, 0.0)
    lse = (torch.log2(state.total.double()).float() + state.top) / LOG2E
    if config.smooth_k and codes.get("km") is not None:
        moved = (q.double() * per_head("km").double()).sum(-1).float() * config.sm_scale
        lse = lse + moved.unsqueeze(-1)
    return out, torch.where(has_keys, lse, -math.inf).squeeze(-1)
