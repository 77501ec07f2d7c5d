"""A whole DeepSeek-V4 over full sequences, without caches, on tensors with the official names.

Everything is FP32 and differentiable. When the configuration declares a quantisation it is
simulated where the official `inference/model.py` quantises: 1 x 128 FP8 inputs of quantised
linears, 1 x 64 FP8 key-value vectors except their rotated channels, Hadamard and 1 x 32 FP4 indexer
queries and keys; gradients pass straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.reference import indexer, mhc, moe, rope
from dsv4.reference.attention import attention_with_lse, merge
from dsv4.reference.compressor import compress, visible_entries
from dsv4.reference.hadamard import hadamard
from dsv4.reference.norm import rms_norm
from dsv4.reference.quantize import (
    fake_quantize_e2m1,
    fake_quantize_e4m3,
    fake_quantize_nvfp4,
)
from dsv4.reference.router import route
from dsv4.reference.weights import decode_fp4, decode_fp8, decode_nvfp4


@dataclass(frozen=True)
class ReferenceOutput:
    """Result of a forward pass over [B, S] tokens.

    Attributes:
        logits: [B, S, vocab]; row t predicts token t + 1.
        streams: [B, S, n, D], the residual streams before the head.
        mtp_logits: one [B, S - 1 - i, vocab] for MTP block i; row t predicts token t + 2 + i.
    """

    logits: Tensor
    streams: Tensor
    mtp_logits: tuple[Tensor, ...]


class IndexTrace(NamedTuple):
    """Trace of a CSA layer's indexer: enough to train it, since the choice itself has no gradient.

    Attributes:
        layer: index of the layer.
        scores: [B, S, N]; visible, selected: bool [B, S, N].
        attention: [B, S, N], sum over heads of e^(logit - lse), for all entries, selected or not,
            with the lse of the keys the query did see; without gradient.
    """

    layer: int
    scores: Tensor
    visible: Tensor
    selected: Tensor
    attention: Tensor


class RouteTrace(NamedTuple):
    """Trace of the experts a MoE sublayer chose: enough to balance their load by the router's bias.

    Attributes:
        prefix: name of the sublayer, such as "layers.1.ffn.".
        ids: [B, S, top_k].
    """

    prefix: str
    ids: Tensor


Traces = list[IndexTrace | RouteTrace]


class ReferenceModel:
    """The model of `config` with `tensors`.

    Args:
        config: any object with the fields of `dsv4.config.ModelConfig`. What can be read off
            the tensors is: compression rates and overlap from `ape`, hash routing from `tid2eid`,
            the indexer from its weights.
        tensors: official names. Weights with a `.scale` sibling (or `.weight_scale`: NVFP4) are
            decoded, others are taken as they are. Routed experts either one by one
            (`experts.{e}.w1.weight`) or stacked (`experts.w1.weight`, [E, ...]).
        compressed_branch: False leaves out the compressed entries of every layer, to see what they
            are worth.
        rounds_nvfp4_inputs: whether inputs of NVFP4 experts are rounded to NVFP4 where there is an
            `.input_scale` of each; False is what runs on Hopper.
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        *,
        compressed_branch: bool = True,
        rounds_nvfp4_inputs: bool = True,
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.compressed_branch = compressed_branch
        self.quantized = config.linear_scheme is not None or config.expert_scheme is not None
        quantize = partial(fake_quantize_e4m3, block=128)
        self.quantize_linear = quantize if config.linear_scheme else lambda x: x
        self.rounds_nvfp4_inputs = rounds_nvfp4_inputs
        rotated, theta = config.qk_rope_head_dim, config.compress_rope_theta
        device = tensors["embed.weight"].device
        self.window_freqs = rope.frequencies(rotated, config.rope_theta, device=device)
        self.compress_freqs = rope.frequencies(rotated, theta, config.rope_scaling, device)

    def forward(self, input_ids: Tensor, *, traces: Traces | None = None) -> ReferenceOutput:
        """Logits of [B, S] token ids; `traces`, if given, is appended to by every layer."""
        streams = self.embed(input_ids)
        for layer in range(self.config.num_hidden_layers):
            streams = self.block(f"layers.{layer}.", streams, input_ids, traces, layer)
        mtp_logits, hidden = [], streams
        for index in range(self.config.num_nextn_predict_layers):
            # Row t holds X_t; the block also reads token t + 1 + index.
            next_ids = input_ids[:, 1 + index :]
            hidden = self.mtp(hidden[:, : next_ids.shape[1]], next_ids, index, traces)
            mtp_logits.append(self.head(hidden, f"mtp.{index}."))
        return ReferenceOutput(self.head(streams, ""), streams, tuple(mtp_logits))

    def embed(self, input_ids: Tensor) -> Tensor:
        """[B, S, n, D]: n equal copies of each token's embedding."""
        embedded = self.tensors["embed.weight"][input_ids].float()
        return embedded[..., None, :].expand(*input_ids.shape, self.config.hc_mult, -1)

    def mtp(
        self, streams: Tensor, next_ids: Tensor, index: int = 0, traces: Traces | None = None
    ) -> Tensor:
        """MTP block at positions 0..S-1: streams [B, S, n, D], ids [B, S] of the next tokens."""
        prefix, eps = f"mtp.{index}.", self.config.rms_norm_eps
        embedded = rms_norm(
            self.tensors["embed.weight"][next_ids], self.tensors[prefix + "enorm.weight"], eps
        )
        hidden = rms_norm(streams, self.tensors[prefix + "hnorm.weight"], eps)
        joined = self.linear(prefix + "e_proj", embedded)[..., None, :] + self.linear(
            prefix + "h_proj", hidden
        )
        return self.block(prefix, joined, next_ids, traces, self.config.num_hidden_layers + index)

    def head(self, streams: Tensor, prefix: str) -> Tensor:
        """Logits [B, S, vocab] of final streams; prefix "" = main model, "mtp.0." = MTP block."""
        t, config = self.tensors, self.config
        fn, base, scale = (t[f"{prefix}hc_head_{name}"] for name in ("fn", "base", "scale"))
        x = mhc.head(streams, fn, base, scale, eps=config.hc_eps, norm_eps=config.rms_norm_eps)
        return (
            rms_norm(x, t[prefix + "norm.weight"], config.rms_norm_eps) @ t["head.weight"].float().T
        )

    def block(
        self,
        prefix: str,
        streams: Tensor,
        input_ids: Tensor,
        traces: Traces | None,
        layer: int,
    ) -> Tensor:
        """One layer: attention and MoE, each between the mixing of its streams."""
        mix = self._mixing(prefix + "hc_attn_", streams)
        x = self._norm(prefix + "attn_norm", mhc.contract(streams, mix.pre))
        y = self.attention(prefix + "attn.", x, traces, layer)
        streams = mhc.expand(y, streams, mix.post, mix.comb)
        mix = self._mixing(prefix + "hc_ffn_", streams)
        x = self._norm(prefix + "ffn_norm", mhc.contract(streams, mix.pre))
        return mhc.expand(
            self.moe(prefix + "ffn.", x, input_ids, traces), streams, mix.post, mix.comb
        )

    def attention(self, prefix: str, x: Tensor, traces: Traces | None, layer: int) -> Tensor:
        """Attention sublayer on its normed input x [B, S, D]."""
        config, t = self.config, self.tensors
        positions = torch.arange(x.shape[1], device=x.device)
        compressed = prefix + "compressor.ape" in t
        freqs = self.compress_freqs if compressed else self.window_freqs
        qr = self._norm(prefix + "q_norm", self.linear(prefix + "wq_a", x))
        q = self.linear(prefix + "wq_b", qr).unflatten(-1, (-1, config.head_dim))
        q = rope.rotate(rms_norm(q, None, config.rms_norm_eps), positions[:, None], freqs)
        kv = self._norm(prefix + "kv_norm", self.linear(prefix + "wkv", x))
        kv = self._quantize_kv(rope.rotate(kv, positions, freqs))
        age = positions[:, None] - positions
        scale = config.head_dim**-0.5
        o_w, lse_w = attention_with_lse(q, kv, (age >= 0) & (age < config.sliding_window), scale)
        o_c, lse_c = torch.zeros_like(o_w), torch.full_like(lse_w, -torch.inf)
        choice = None
        if compressed and self.compressed_branch:
            entries = self._quantize_kv(self._entries(prefix + "compressor.", x, config.head_dim))
            rate = t[prefix + "compressor.ape"].shape[0]
            visible = visible_entries(positions, entries.shape[-2], rate)
            if prefix + "indexer.wq_b.weight" in t:
                # The choice has no gradient, and a loss on the scores is the indexer's own.
                scores = self._index_scores(prefix + "indexer.", x.detach(), qr.detach())
                chosen = indexer.select_top_k(scores, visible.expand_as(scores), config.index_topk)
                selected = indexer.selection_mask(chosen, entries.shape[-2])
                choice, visible = (scores, visible, selected), selected
            o_c, lse_c = attention_with_lse(q, entries, visible, scale)
        o, lse = merge(o_c, lse_c, o_w, lse_w, t[prefix + "attn_sink"], "softmax")
        if choice is not None and traces is not None:
            with torch.no_grad():
                logits = torch.einsum("...thd,...nd->...thn", q, entries) * scale
                traces.append(IndexTrace(layer, *choice, (logits - lse[..., None]).exp().sum(-2)))
        # V carries the rotation of its key position; rotating back by the query's leaves the
        # relative angle.
        o = rope.rotate(o, positions[:, None], freqs, inverse=True)
        groups = o.flatten(-2).unflatten(-1, (config.o_groups, -1))
        wo_a = self.weight(prefix + "wo_a").unflatten(0, (config.o_groups, -1))
        return self.linear(
            prefix + "wo_b", torch.einsum("...gi,goi->...go", groups, wo_a).flatten(-2)
        )

    def moe(
        self, prefix: str, x: Tensor, input_ids: Tensor, traces: Traces | None = None
    ) -> Tensor:
        """MoE sublayer on its normed input x [B, S, D]."""
        config, t = self.config, self.tensors
        ids, weights = route(
            x,
            t[prefix + "gate.weight"],
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            bias=t.get(prefix + "gate.bias"),
            table=t.get(prefix + "gate.tid2eid"),
            input_ids=input_ids,
        )
        if traces is not None:
            traces.append(RouteTrace(prefix, ids))
        dense = moe.dense_weights(ids, weights, config.n_routed_experts)
        w1, w2, w3 = (self._experts(prefix + "experts.", name) for name in ("w1", "w2", "w3"))
        rounding = self._rounding(prefix + "experts.")
        y = moe.routed_experts(x, w1, w2, w3, dense, config.swiglu_limit, *rounding)
        w1, w2, w3 = (self.weight(f"{prefix}shared_experts.{name}") for name in ("w1", "w2", "w3"))
        return y + moe.shared_expert(x, w1, w2, w3, config.swiglu_limit, self.quantize_linear)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Product with a weight of the quantised kind: its input is quantised too."""
        return self.quantize_linear(x) @ self.weight(name).T

    def weight(self, name: str) -> Tensor:
        """FP32 value of `{name}.weight`, decoded by its dtype and its scale."""
        return self._decode(*(self.tensors.get(f"{name}.{part}") for part in _PARTS))

    def _decode(
        self,
        weight: Tensor,
        scale: Tensor | None,
        nv_scale: Tensor | None,
        nv_global: Tensor | None,
    ) -> Tensor:
        if nv_scale is not None:
            return decode_nvfp4(weight, nv_scale, nv_global)
        if scale is None:
            return weight.float()
        if weight.dtype in (torch.int8, torch.uint8):
            return decode_fp4(weight, scale)
        return decode_fp8(weight, scale, self.config.fp8_block)

    def _experts(self, prefix: str, name: str) -> Tensor:
        if f"{prefix}{name}.weight" in self.tensors:
            return self.weight(prefix + name)
        return torch.stack(
            [self.weight(f"{prefix}{e}.{name}") for e in range(self.config.n_routed_experts)]
        )

    def _rounding(self, prefix: str) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Of the inputs of w1 and w3, and of w2, of the routed experts."""
        if any(f"{prefix}{each}w1.weight_scale" in self.tensors for each in ("", "0.")):
            scales = [self._input_scales(prefix, name) for name in ("w1", "w3", "w2")]
            if not self.rounds_nvfp4_inputs or any(scale is None for scale in scales):
                return (lambda x: x,) * 2
            # Experts read the same tokens.
            of_x = torch.cat(scales[:2]).amax()[None]
            return (
                lambda x: fake_quantize_nvfp4(x, of_x),
                lambda hidden: fake_quantize_nvfp4(hidden, scales[2]),
            )
        if self.config.expert_scheme is None:
            return (lambda x: x,) * 2
        return (partial(fake_quantize_e4m3, block=128),) * 2

    def _input_scales(self, prefix: str, name: str) -> Tensor | None:
        """[E], those of all experts; None where one has none."""
        stacked = self.tensors.get(f"{prefix}{name}.input_scale")
        if stacked is not None:
            return stacked
        experts = range(self.config.n_routed_experts)
        found = [self.tensors.get(f"{prefix}{e}.{name}.input_scale") for e in experts]
        return None if any(one is None for one in found) else torch.stack(found)

    def _entries(self, prefix: str, x: Tensor, dim: int) -> Tensor:
        """Compressed entries [B, N, dim], normed and rotated at their block's first position."""
        t = self.tensors
        ape = t[prefix + "ape"]
        wkv, wgate = t[prefix + "wkv.weight"], t[prefix + "wgate.weight"]
        pooled = compress(x, wkv, wgate, ape, overlap=ape.shape[1] == 2 * dim)
        starts = torch.arange(pooled.shape[-2], device=x.device) * ape.shape[0]
        return rope.rotate(self._norm(prefix + "norm", pooled), starts, self.compress_freqs)

    def _index_scores(self, prefix: str, x: Tensor, qr: Tensor) -> Tensor:
        config = self.config
        heads, dim = config.index_n_heads, config.index_head_dim
        positions = torch.arange(x.shape[1], device=x.device)
        q = self.linear(prefix + "wq_b", qr).unflatten(-1, (heads, dim))
        q = rope.rotate(q, positions[:, None], self.compress_freqs)
        k = self._entries(prefix + "compressor.", x, dim)
        if self.quantized:
            q, k = fake_quantize_e2m1(hadamard(q)), fake_quantize_e2m1(hadamard(k))
        weights = x @ self.tensors[prefix + "weights_proj.weight"].float().T * (heads * dim) ** -0.5
        return indexer.index_scores(q, k, weights)

    def _quantize_kv(self, kv: Tensor) -> Tensor:
        if not self.quantized:
            return kv
        nope = self.config.head_dim - self.config.qk_rope_head_dim
        return torch.cat((fake_quantize_e4m3(kv[..., :nope], 64), kv[..., nope:]), -1)

    def _mixing(self, prefix: str, streams: Tensor) -> mhc.Mixing:
        config = self.config
        fn, base, scale = (self.tensors[prefix + name] for name in ("fn", "base", "scale"))
        return mhc.mixing(
            streams,
            fn,
            base,
            scale,
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[name + ".weight"], self.config.rms_norm_eps)


_PARTS = ("weight", "scale", "weight_scale", "weight_scale_2")
