"""The model of the tiny checkpoint as it is trained: rounded weights, dropout, few large kernels.

The equations are those of `dsv4.reference.ReferenceModel`, and a test holds the two together. What
differs is the form, for the time of a step: one softmax over window, entries and sink; windows as
blocks of keys; roundings by casts, rotations in place, Sinkhorn's passes as one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad, rms_norm, silu, softplus

from dsv4.config.model_config import ModelConfig
from dsv4.loader import TensorSpec
from dsv4.reference import mhc, rope
from dsv4.reference.compressor import compress, visible_entries
from dsv4.reference.hadamard import hadamard
from dsv4.reference.quantize import (
    E4M3_AMAX_FLOOR,
    E4M3_MAX,
    ceil_log2,
    exp2_int,
    fake_quantize_e2m1,
)
from dsv4.reference.weights import fake_quantize_fp4, fake_quantize_fp8


class Indexed(NamedTuple):
    """What a CSA layer's indexer did.

    Attributes:
        scores: [B, S, N] FP32; visible: [S, N] bool.
        attention: [B, S, N], sum over heads of e^(logit - lse) of every visible entry, selected or
            not, with the lse of the keys the query did see; without gradient.
    """

    scores: Tensor
    visible: Tensor
    attention: Tensor


class Output(NamedTuple):
    """Losses of a batch and what its layers did.

    Attributes:
        main: [B, S] loss of the next token; drafts: [B, S - 1] loss of the one after, by MTP.
        indexed: one for each CSA layer.
        loads: tokens that each expert of a score-routed layer got, [E] by the router's prefix.
    """

    main: Tensor
    drafts: Tensor
    indexed: list[Indexed]
    loads: dict[str, Tensor]


# ---- rounding ------------------------------------------------------------------------------


def _as_if(x: Tensor, y: Tensor) -> Tensor:
    """`y`, differentiated as if it were `x`; exact, since x - x is 0."""
    return y.detach() + (x - x.detach())


class _RoundE4m3(torch.autograd.Function):
    """`fake_quantize_e4m3` by a cast; gradients pass straight through."""

    @staticmethod
    def forward(ctx, x: Tensor, block: int) -> Tensor:
        groups = x.unflatten(-1, (-1, block))
        amax = torch.linalg.vector_norm(groups, torch.inf, dim=-1, keepdim=True)
        scale = exp2_int(ceil_log2(amax.clamp(min=E4M3_AMAX_FLOOR) * (1 / E4M3_MAX)))
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _e4m3(x: Tensor, block: int = 128) -> Tensor:
    return _RoundE4m3.apply(x, block)


def _e2m1(x: Tensor) -> Tensor:
    return fake_quantize_e2m1(x)


def rounded(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Every weight as its file will hold it; gradients pass straight through the rounding.

    Weights of one format are rounded together: a format's tiles lie in one tensor meanwhile.

    Args:
        tensors: FP32 weights, experts stacked; both sizes of FP8 ones multiples of 128.
        specs: stored dtype of each.
    """
    formats: dict[torch.dtype, tuple[tuple[int, int], Callable[[Tensor], Tensor]]] = {
        torch.float8_e4m3fn: ((128, 128), fake_quantize_fp8),
        torch.int8: ((1, 32), fake_quantize_fp4),
        torch.bfloat16: ((1, 1), lambda x: x.bfloat16().float()),
    }
    out = dict(tensors)
    for dtype, ((rows, columns), quantize) in formats.items():
        names = [name for name in tensors if specs[name].dtype == dtype]
        grids = [
            tensors[name].reshape(-1, rows, tensors[name].shape[-1] // columns, columns)
            for name in names
        ]
        tiles = torch.cat([grid.transpose(1, 2).reshape(-1, rows, columns) for grid in grids])
        tiles = _as_if(tiles, quantize(tiles.detach()))
        pieces = tiles.split([grid.numel() // (rows * columns) for grid in grids])
        for name, grid, piece in zip(names, grids, pieces):
            there = piece.view(grid.shape[0], grid.shape[2], rows, columns).transpose(1, 2)
            out[name] = there.reshape(tensors[name].shape)
    return out


# ---- pieces of a layer ---------------------------------------------------------------------


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
    return _normed(x, norm, config), post, comb


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """`dsv4.reference.mhc.sinkhorn`; on a GPU one kernel each way."""
    if scores.device.type != "cuda":
        return mhc.sinkhorn(scores, iterations, eps)
    # Triton comes with CUDA builds of torch only.
    from scripts.tools import tiny_sinkhorn

    return tiny_sinkhorn.sinkhorn(scores, iterations, eps)


def _normed(x: Tensor, weight: Tensor | None, config: ModelConfig) -> Tensor:
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
    x = _e4m3(x) if rounds else x
    qr = _normed(x @ w["wq_a.weight"].T, w["q_norm.weight"], config)
    q = ((_e4m3(qr) if rounds else qr) @ w["wq_b.weight"].T).unflatten(-1, (-1, config.head_dim))
    q = rotate(_normed(q, None, config), turn[:, None])
    kv = rotate(_normed(x @ w["wkv.weight"].T, w["kv_norm.weight"], config), turn)
    return q, _rounded_kv(kv, config), qr


def _rounded_kv(kv: Tensor, config: ModelConfig) -> Tensor:
    if config.linear_scheme is None:
        return kv
    nope = config.head_dim - config.qk_rope_head_dim
    return torch.cat((_e4m3(kv[..., :nope], 64), kv[..., nope:]), -1)


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
    return rotate(_normed(pooled, w["norm.weight"], config), turn)


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
    q = ((_e4m3(qr) if rounds else qr) @ w["wq_b.weight"].T).unflatten(-1, (heads, dim))
    q = rotate(q, turn[:, None])
    if rounds:
        q, keys = _e2m1(hadamard(q)), _e2m1(hadamard(keys))
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
    return (_e4m3(latent) if config.linear_scheme else latent) @ w["wo_b.weight"].T


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

    rounds = (lambda t: _e4m3(t)) if config.linear_scheme else (lambda t: t)
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
    logits = _normed(x, norm, config) @ head.T
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


# ---- the model -----------------------------------------------------------------------------


class TrainedModel:
    """Losses of a batch under weights that change from step to step.

    Args:
        config: with quantisation schemes: the model is trained under the roundings of inference.
        length: tokens of a row, no fewer than the largest compression rate.
        device: where it runs.
    """

    def __init__(self, config: ModelConfig, *, length: int, device: torch.device) -> None:
        self.config = config
        angles = lambda *args: (
            torch.arange(length, device=device)[:, None]
            * rope.frequencies(config.qk_rope_head_dim, *args, device=device)
        )
        window = angles(config.rope_theta, None)
        stretched = angles(config.compress_rope_theta, config.rope_scaling)
        self.window_turn = torch.polar(torch.ones_like(window), window)
        self.compress_turn = torch.polar(torch.ones_like(stretched), stretched)

    def forward(
        self, tensors: Mapping[str, Tensor], ids: Tensor, dropped: Tensor, sparse: Tensor
    ) -> Output:
        """Losses of every token.

        Args:
            tensors: FP32 weights by official name, experts stacked.
            ids: [B, length + 1] tokens.
            dropped: [B], share of whole embeddings and of sublayers' outputs that is dropped.
            sparse: see `index`.
        """
        config, t, out = self.config, tensors, Output(ids, ids, [], {})
        inputs, following = ids[:, :-1], ids[:, 1:]
        embedded = self._embedded(t, inputs)
        rate = dropped[:, None, None]
        kept = torch.rand(inputs.shape, device=ids.device)[..., None] >= rate
        streams = (embedded * kept)[..., None, :].expand(-1, -1, config.hc_mult, -1).contiguous()
        for layer in range(config.num_hidden_layers):
            streams = self._block(t, f"layers.{layer}.", streams, inputs, dropped, sparse, out)
        main = self._losses(t, "", streams, following)
        # MTP row s has read token s + 1 and predicts token s + 2; the last has nothing to predict.
        ahead = _normed(self._embedded(t, following), t["mtp.0.enorm.weight"], config)
        hidden = _normed(streams, t["mtp.0.hnorm.weight"], config)
        if config.linear_scheme is not None:
            ahead, hidden = _e4m3(ahead), _e4m3(hidden)
        joined = (ahead @ t["mtp.0.e_proj.weight"].T)[..., None, :]
        joined = joined + hidden @ t["mtp.0.h_proj.weight"].T
        hidden = self._block(t, "mtp.0.", joined, following, dropped, sparse, out)
        drafts = self._losses(t, "mtp.0.", hidden, following.roll(-1, 1))[:, :-1]
        return out._replace(main=main, drafts=drafts)

    def _embedded(self, t: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        # As a product: the gradient of an indexed read adds up row after row.
        table = t["embed.weight"]
        every = torch.arange(table.shape[0], device=ids.device)
        return (ids[..., None] == every).to(table.dtype) @ table

    def _losses(
        self, t: Mapping[str, Tensor], prefix: str, streams: Tensor, targets: Tensor
    ) -> Tensor:
        parts = (t[f"{prefix}hc_head_{name}"] for name in ("fn", "base", "scale"))
        norm, head = t[prefix + "norm.weight"], t["head.weight"]
        return token_losses(streams, targets, *parts, norm, head, self.config)

    def _block(
        self,
        t: Mapping[str, Tensor],
        prefix: str,
        streams: Tensor,
        ids: Tensor,
        dropped: Tensor,
        sparse: Tensor,
        out: Output,
    ) -> Tensor:
        parts = lambda of: (t[f"{prefix}hc_{of}_{name}"] for name in ("fn", "base", "scale"))
        norm = t[prefix + "attn_norm.weight"]
        x, post, comb = read_streams(streams, *parts("attn"), norm, self.config)
        y = self._attention(_below(t, prefix + "attn."), x, sparse, out)
        streams = write_streams(y, streams, post, comb, dropped)
        norm = t[prefix + "ffn_norm.weight"]
        x, post, comb = read_streams(streams, *parts("ffn"), norm, self.config)
        w = _below(t, prefix + "ffn.")
        table = w.pop("gate.tid2eid", None)
        y, load = experts(x, None if table is None else table[ids], w, self.config)
        if table is None:
            out.loads[prefix + "ffn."] = load
        return write_streams(y, streams, post, comb, dropped)

    def _attention(self, w: dict[str, Tensor], x: Tensor, sparse: Tensor, out: Output) -> Tensor:
        config = self.config
        turn = self.compress_turn if "compressor.ape" in w else self.window_turn
        linears = {name: w[name] for name in _LINEARS}
        q, kv, qr = queries_and_keys(x, linears, turn, config)
        compressed = selected = None
        if "compressor.ape" in w:
            rate = w["compressor.ape"].shape[0]
            last = x.shape[1] // rate * rate
            starts = turn[:last:rate]
            compressed = entries(x, _below(w, "compressor."), starts, config)
            if "indexer.wq_b.weight" in w:
                # The choice has no gradient, and the loss of the scores is the indexer's own.
                apart, own = x.detach(), _below(w, "indexer.")
                keys = entries(apart, _below(own, "compressor."), starts, config)
                scores, visible, selected = index(
                    apart, qr.detach(), keys, own, turn, sparse, config
                )
            else:
                positions = torch.arange(x.shape[1], device=x.device)
                selected = visible_entries(positions, compressed.shape[1], rate)[None]
        o, attention = attend(q, kv, compressed, selected, w["attn_sink"], config)
        if "indexer.wq_b.weight" in w:
            out.indexed.append(Indexed(scores, visible, attention))
        return project(o, linears, turn, config)


_LINEARS = (
    "wq_a.weight",
    "q_norm.weight",
    "wq_b.weight",
    "wkv.weight",
    "kv_norm.weight",
    "wo_a.weight",
    "wo_b.weight",
)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
