"""The model of the tiny checkpoint as it is trained: losses of a batch under rounded weights.

It equals `dsv4.reference.ReferenceModel`, and a test holds the two together; `tiny_layers` says
what differs in form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config.model_config import ModelConfig
from dsv4.reference import rope
from dsv4.reference.compressor import visible_entries
from scripts.tools.tiny_layers import (
    attend,
    entries,
    experts,
    index,
    normed,
    project,
    queries_and_keys,
    read_streams,
    token_losses,
    write_streams,
)
from scripts.tools.tiny_rounding import round_e4m3


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
        ahead = normed(self._embedded(t, following), t["mtp.0.enorm.weight"], config)
        hidden = normed(streams, t["mtp.0.hnorm.weight"], config)
        if config.linear_scheme is not None:
            ahead, hidden = round_e4m3(ahead), round_e4m3(hidden)
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
