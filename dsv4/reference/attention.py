"""Sparse attention over compressed entries and a sliding window, with both sink modes, in FP32.

K and V are the same latent vectors (multi-query attention with one KV head).
"""

from __future__ import annotations

import torch
from torch import Tensor

SINK_MODES = ("swa_gate", "softmax")


def attention_with_lse(
    q: Tensor, kv: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One branch: softmax attention over the visible keys, and the log of its denominator.

    Args:
        q: [..., T, H, D].
        kv: [..., K, D], shared by the T queries.
        visible: bool [..., T, K].
        scale: multiplies q . k.

    Returns:
        o [..., T, H, D] FP32 and lse [..., T, H] FP32 (natural log); a query that sees no key gets
        0 and -inf.
    """
    # A row that no token sees may hold NaN, and 0 * NaN is NaN.
    kv = torch.where(visible.any(-2)[..., None], kv.float(), 0.0)
    logits = torch.einsum("...thd,...kd->...thk", q.float(), kv) * scale
    logits = logits.masked_fill(~visible.unsqueeze(-2), -torch.inf)
    top = (
        logits.detach().amax(-1, keepdim=True)
        if logits.shape[-1]
        else logits.new_zeros(*logits.shape[:-1], 1)
    )
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    o = torch.einsum("...thk,...kd->...thd", weights, kv) / safe[..., None]
    lse = torch.where(empty, -torch.inf, top.squeeze(-1) + safe.log())
    return o, lse


def merge(
    o_c: Tensor, lse_c: Tensor, o_w: Tensor, lse_w: Tensor, sink: Tensor, sink_mode: str
) -> tuple[Tensor, Tensor]:
    """Join the compressed and the window branch; no exponential is of a raw lse or sink.

    Args:
        o_c, o_w: [..., H, D] branch outputs; lse_c, lse_w: [..., H], -inf for an empty branch.
        sink: [H], natural log.
        sink_mode: "softmax": (e^lse_c o_c + e^lse_w o_w) / (e^lse_c + e^lse_w + e^sink), and the
            log of the denominator without the sink (technical report section 2.3.3; official
            `sparse_attn`); "swa_gate": (e^lse_c o_c + e^sink e^lse_w o_w) / (e^lse_c + e^sink
            e^lse_w), the sink counting as 0 when either branch is empty, and the log of that
            denominator.
    """
    if sink_mode not in SINK_MODES:
        raise ValueError(f"sink_mode: expected one of {SINK_MODES}, got {sink_mode!r}")
    no_c, no_w = lse_c == -torch.inf, lse_w == -torch.inf
    # Differences of infinities are NaN, in the gradient too: empty branches take part as 0 and are
    # selected away.
    a, b = torch.where(no_c, 0.0, lse_c), torch.where(no_w, 0.0, lse_w)
    gate = sink.float() if sink_mode == "swa_gate" else torch.zeros_like(sink, dtype=torch.float32)
    share = torch.sigmoid(b + gate - a)
    share = torch.where(no_c, 1.0, torch.where(no_w, 0.0, share))
    share = torch.where(no_c & no_w, 0.0, share)
    o = (1 - share)[..., None] * o_c + share[..., None] * o_w
    gated = b + gate
    high, low = torch.maximum(a, gated), torch.minimum(a, gated)
    both = torch.where(high.isinf(), high, high + torch.log1p(torch.exp(low - high)))
    lse = torch.where(no_c, lse_w, torch.where(no_w, lse_c, both))
    if sink_mode == "softmax":
        finite = torch.where(no_c & no_w, 0.0, lse)
        keep = torch.where(no_c & no_w, 0.0, torch.sigmoid(finite - sink.float()))
        o = o * keep[..., None]
    return o, lse


def window_visibility(
    swa_lens: Tensor, request_ids: Tensor, width: int, sliding_window: int, *, is_causal: bool
) -> Tensor:
    """bool [T, width]: which rows of its request's window each token sees.

    Without `is_causal` every row below the request's length. With it rows are chronological and the
    tokens of a
    request consecutive: the j-th of its c tokens sits at p = len - c + j and sees p -
        sliding_window < i <= p.
    Padding tokens (request -1) see nothing.
    """
    row = torch.arange(width, device=swa_lens.device)
    lens = swa_lens.clamp(0, width)
    visible = torch.zeros(request_ids.numel(), width, dtype=torch.bool, device=swa_lens.device)
    for request in range(swa_lens.numel()):
        tokens = (request_ids == request).nonzero().flatten()
        if not is_causal:
            visible[tokens] = row < lens[request]
            continue
        position = lens[request] - tokens.numel() + torch.arange(tokens.numel(), device=row.device)
        visible[tokens] = (row <= position[:, None]) & (row > position[:, None] - sliding_window)
    return visible


def sparse_fmha_with_swa(
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    *,
    sink_mode: str,
    compressed_lens: Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention contract of the package, in FP32.

    Args:
        q: [T, H, D].
        compressed_kv: [T, top_k, D]; rows at and past `compressed_lens` [T] (default top_k) are
            ignored.
        swa_kv: [batch, W, D]; swa_lens: [batch] valid rows, clamped to 0..W.
        sink_logits: [H], natural log, not scaled; +-inf allowed.
        request_ids: [T], row set of `swa_kv` a token uses; -1 = padding token.
        sink_mode: see `merge`.
        is_causal, sliding_window: see `window_visibility`; the window defaults to W.
        softmax_scale: default D^-0.5.

    Returns:
        o [T, H, D] FP32 and lse [T, H] FP32; a padding token gets 0 and -inf.
    """
    tokens, _, dim = q.shape
    top_k, width = compressed_kv.shape[1], swa_kv.shape[1]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    active = request_ids >= 0
    lens = (
        torch.full_like(request_ids, top_k)
        if compressed_lens is None
        else compressed_lens.clamp(0, top_k)
    )
    sees_c = (torch.arange(top_k, device=q.device) < lens[:, None]) & active[:, None]
    sees_w = window_visibility(
        swa_lens, request_ids, width, sliding_window or width, is_causal=is_causal
    )
    # Every token is a batch row of its own: nothing another token sees can reach it.
    q = torch.where(active[:, None, None], q.float(), 0.0).unsqueeze(1)
    window = (
        swa_kv[request_ids.clamp(min=0).long()]
        if swa_kv.shape[0]
        else swa_kv.new_zeros(tokens, width, dim)
    )
    o_c, lse_c = attention_with_lse(q, compressed_kv, sees_c.unsqueeze(1), scale)
    o_w, lse_w = attention_with_lse(q, window, sees_w.unsqueeze(1), scale)
    o, lse = merge(o_c, lse_c, o_w, lse_w, sink_logits, sink_mode)
    return o.squeeze(1), lse.squeeze(1)
