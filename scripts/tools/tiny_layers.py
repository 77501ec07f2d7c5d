"""Sublayers of the tiny checkpoint in training, as pure functions of activations and weights.

The equations are those of `dsv4.reference`. What differs is the form, for the time of a step: one
softmax over window, entries and sink; windows as blocks of keys; roundings by casts, rotations in
place, Sinkhorn's passes as one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad, rms_norm, silu, softplus

from dsv4.config.model_config import ModelConfig
from dsv4.reference import mhc
from dsv4.reference.compressor import compress, visible_entries
from dsv4.reference.hadamard import hadamard
from dsv4.reference.quantize import fake_quantize_e2m1
from scripts.tools.tiny_rounding import round_e4m3


def read_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed input [B, S, D] of a sublayer, `post` and `comb` of its mixing."""
    n, eps = config.hc_mult, config.hc_eps
    flat = streams.flatten(-2)
    m = rms_norm(flat, flat.shape[-1:], None, config.rms_norm_eps) @ fn.T
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    scores = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = sinkhorn(scores, config.hc_sinkhorn_iters, eps)
    x = (pre.unsqueeze(-2) @ streams).squeeze(-2)
    return normed(x, norm, config), post, comb


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """`dsv4.reference.mhc.sinkhorn`; on a GPU one kernel each way."""
    if scores.device.type != "cuda":
        return mhc.sinkhorn(scores, iterations, eps)
    # Triton comes with CUDA builds of torch only.
    from scripts.tools import tiny_sinkhorn

    return tiny_sinkhorn.sinkhorn(scores, iterations, eps)


def normed(x: Tensor, weight: Tensor | None, config: ModelConfig) -> Tensor:
    """RMSNorm of the last dimension, times the weight if there is one."""
    return rms_norm(x, x.shape[-1:], weight, config.rms_norm_eps)


def write_streams(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, dropped: Tensor
) -> Tensor:
    """Streams after a sublayer; `dropped` [B] is the share of its output y that is dropped."""
    rate = dropped[:, None, None]
    y = y * ((torch.rand_like(y) >= rate) / (1 - rate))
    return torch.addcmul(comb.mT @ streams, post[..., None], y[..., None, :])


class _Rotate(torch.autograd.Function):
    """Rotation of the last channels by complex factors."""

    @staticmethod
    def forward(ctx, x: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        return _turned(x, turn)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _turned(grad, ctx.saved_tensors[0].conj()), None


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    torch.view_as_complex(out[..., -2 * turn.shape[-1] :].unflatten(-1, (-1, 2))).mul_(turn)
    return out


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the last channels of x [..., D] by the complex factors turn [..., R / 2]."""
    return _Rotate.apply(x, turn)


def queries_and_keys(
    x: Tensor, w: Mapping[str, Tensor], turn: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, D], kv [B, S, D], and the latent queries qr [B, S, R]."""
    rounds = config.linear_scheme is not None
    x = round_e4m3(x) if rounds else x
    qr = normed(x @ w["wq_a.weight"].T, w["q_norm.weight"], config)
    q = ((round_e4m3(qr) if rounds else qr) @ w["wq_b.weight"].T).unflatten(
        -1, (-1, config.head_dim)
    )
    q = rotate(normed(q, None, config), turn[:, None])
    kv = rotate(normed(x @ w["wkv.weight"].T, w["kv_norm.weight"], config), turn)
    return q, _rounded_kv(kv, config), qr


def _rounded_kv(kv: Tensor, config: ModelConfig) -> Tensor:
    if config.linear_scheme is None:
        return kv
    nope = config.head_dim - config.qk_rope_head_dim
    return torch.cat((round_e4m3(kv[..., :nope], 64), kv[..., nope:]), -1)


def entries(x: Tensor, w: Mapping[str, Tensor], turn: Tensor, config: ModelConfig) -> Tensor:
    """Compressed entries [B, N, D] of attention or indexer, before their rounding.

    Args:
        x: [B, S, hidden].
        w: weights of a compressor.
        turn: [N, R / 2], of each block's first position.
    """
    ape = w["ape"]
    overlap = ape.shape[1] == 2 * w["norm.weight"].numel()
    pooled = compress(x, w["wkv.weight"], w["wgate.weight"], ape, overlap=overlap)
    return rotate(normed(pooled, w["norm.weight"], config), turn)


def index(
    x: Tensor,
    qr: Tensor,
    keys: Tensor,
    w: Mapping[str, Tensor],
    turn: Tensor,
    sparse: Tensor,
    config: ModelConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Index scores [B, S, N], visible [S, N] and selected [B, S, N] entries.

    Args:
        sparse: bool, no dimensions: False selects every visible entry.
    """
    heads, dim = config.index_n_heads, config.index_head_dim
    rounds = config.linear_scheme is not None
    q = ((round_e4m3(qr) if rounds else qr) @ w["wq_b.weight"].T).unflatten(-1, (heads, dim))
    q = rotate(q, turn[:, None])
    if rounds:
        q, keys = fake_quantize_e2m1(hadamard(q)), fake_quantize_e2m1(hadamard(keys))
    weights = x @ w["weights_proj.weight"].T * (heads * dim) ** -0.5
    dots = q.flatten(1, 2) @ keys.mT
    scores = (dots.relu().unflatten(1, (-1, heads)) * weights[..., None]).sum(2)
    positions = torch.arange(x.shape[1], device=x.device)
    visible = visible_entries(positions, keys.shape[1], w["compressor.ape"].shape[0])
    if config.index_topk >= keys.shape[1]:
        return scores, visible, visible.expand_as(scores)
    best = scores.detach().masked_fill(~visible, -torch.inf).topk(config.index_topk).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return scores, visible, visible & (chosen | ~sparse)


def attend(
    q: Tensor,
    kv: Tensor,
    compressed: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    config: ModelConfig,
) -> tuple[Tensor, Tensor | None]:
    """Attention over window, entries and sink: o [B, S, H, D], and `Indexed.attention`.

    Args:
        q: [B, S, H, D]; kv: [B, S, D].
        compressed: [B, N, D], rounded here; selected: bool, broadcastable to [B, S, N].
    """
    _, length, heads, dim = q.shape
    window, scale = config.sliding_window, dim**-0.5
    blocks = -(-length // window)
    fill = blocks * window - length
    scaled = q * scale
    # A block of queries sees its own block of keys and the one before.
    keys = pad(kv, (0, 0, window, fill)).unflatten(1, (blocks + 1, window))
    keys = torch.cat((keys[:, :-1], keys[:, 1:]), 2)
    queries = _filled(scaled, fill).unflatten(1, (blocks, window)).flatten(2, 3)
    logits = (queries @ keys.mT).unflatten(2, (window, heads))
    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)
    first = torch.arange(blocks, device=q.device)[:, None, None] == 0
    seen = (column > row) & (column <= row + window) & ~(first & (column < window))
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    near = logits.flatten(1, 2)[:, :length]
    top = torch.maximum(near.detach().amax(-1), sink.detach())
    if compressed is not None:
        compressed = _rounded_kv(compressed, config)
        far = (scaled.flatten(1, 2) @ compressed.mT).unflatten(1, (length, heads))
        chosen = far.masked_fill(~selected.unsqueeze(-2), -torch.inf)
        top = torch.maximum(top, chosen.detach().amax(-1))
    p = (near - top[..., None]).exp()
    total = p.sum(-1)
    blocked = _filled(p, fill).unflatten(1, (blocks, window)).flatten(2, 3)
    o = (blocked @ keys).unflatten(2, (window, heads)).flatten(1, 2)[:, :length]
    attention = None
    if compressed is not None:
        p = (chosen - top[..., None]).exp()
        total = total + p.sum(-1)
        o = o + (p.flatten(1, 2) @ compressed).view_as(q)
        lse = top + total.log()
        attention = (far - lse[..., None]).detach().clamp_(max=30.0).exp_().sum(-2)
    return o / (total + (sink - top).exp())[..., None], attention


def _filled(x: Tensor, rows: int) -> Tensor:
    """x [B, S, H, n] with so many rows of zeros more; no copy for none."""
    return pad(x, (0, 0, 0, 0, 0, rows)) if rows else x


def project(o: Tensor, w: Mapping[str, Tensor], turn: Tensor, config: ModelConfig) -> Tensor:
    """Attention's output [B, S, hidden] of o [B, S, H, D], rotated back."""
    o = rotate(o, turn[:, None].conj())
    wo_a = w["wo_a.weight"].unflatten(0, (config.o_groups, -1))
    groups = o.flatten(-2).unflatten(-1, (config.o_groups, -1))
    latent = torch.cat([groups[..., i, :] @ wo_a[i].T for i in range(config.o_groups)], -1)
    return (round_e4m3(latent) if config.linear_scheme else latent) @ w["wo_b.weight"].T


def experts(
    x: Tensor,
    table_ids: Tensor | None,
    w: Mapping[str, Tensor],
    config: ModelConfig,
) -> tuple[Tensor, Tensor]:
    """MoE output [B, S, D], and how many tokens each expert got, [E].

    Args:
        table_ids: [B, S, k] experts of a hash-routed layer, else None.
    """
    limit, count = config.swiglu_limit, config.n_routed_experts
    scores = softplus(x @ w["gate.weight"].T).sqrt()
    ids = table_ids
    if ids is None:
        ids = (scores + w["gate.bias"]).detach().topk(config.num_experts_per_tok).indices
    chosen = (ids[..., None] == torch.arange(count, device=x.device)).any(-2)
    weights = torch.where(chosen, scores, 0.0)
    weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    rounds = round_e4m3 if config.linear_scheme else (lambda t: t)
    x = rounds(x)
    w1, w2, w3 = (w[f"experts.{name}.weight"] for name in ("w1", "w2", "w3"))
    gate, up = ((x @ m.flatten(0, 1).T).unflatten(-1, (count, -1)) for m in (w1, w3))
    hidden = rounds(swiglu(gate, up) * weights[..., None])
    y = hidden.flatten(-2) @ w2.transpose(1, 2).flatten(0, 1)
    w1, w2, w3 = (w[f"shared_experts.{name}.weight"] for name in ("w1", "w2", "w3"))
    y = y + rounds(swiglu(x @ w1.T, x @ w3.T)) @ w2.T
    return y, chosen.flatten(0, -2).float().sum(0)


def token_losses(
    streams: Tensor,
    targets: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    head: Tensor,
    config: ModelConfig,
) -> Tensor:
    """[B, S] loss of each of the targets [B, S] under the head of the streams [B, S, n, D]."""
    x = mhc.head(streams, fn, base, scale, eps=config.hc_eps, norm_eps=config.rms_norm_eps)
    logits = normed(x, norm, config) @ head.T
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def index_loss(scores: Tensor, visible: Tensor, attention: Tensor, weights: Tensor) -> Tensor:
    """Divergence of the index scores from the attention, both over all visible entries.

    Args:
        scores, visible, attention: see `Indexed`.
        weights: [B, S], how much each token counts.
    """
    target = torch.where(visible, attention, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    guess = scores.masked_fill(~visible, -1e4).log_softmax(-1)
    each = (target * (target.clamp(min=1e-9).log() - guess)).sum(-1)
    return (each * weights).sum() / weights.sum()
