"""The lightning indexer: which compressed entries a query attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.step import Step
from dsv4.layers.compressor import Compressor
from dsv4.layers.linear import Linear, linear_options
from dsv4.layers.module import Module
from dsv4.layers.rope import Rope, rotate_
from dsv4.layers.rounding import round_index
from dsv4.ops.topk import topk_stable

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig

MAX_SCORE_ELEMENTS = 1 << 26
"""Bound on the products [rows, tokens, heads, entries] alive at once: more goes in parts."""


class Indexer(Module):
    """Scores I[t, n] = sum over heads of w[t, h] * relu(q[t, h] . k[n]) and keeps the best.

    Keys are entries of a compressor of its own. Equal scores: the earlier entry wins.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = config.index_n_heads
        self.dim = config.index_head_dim
        self.topk = config.index_topk
        self.rope = rope
        self.quantized = config.quantized
        self.scale = self.dim**-0.5 * self.heads**-0.5
        self.wq_b = Linear(
            config.q_lora_rank, self.heads * self.dim, **linear_options(config, dtype, device)
        )
        self.weights_proj = Linear(config.hidden_size, self.heads, dtype=dtype, device=device)
        self.compressor = Compressor(
            config.hidden_size,
            self.dim,
            spec.ratio,
            spec.overlap,
            config.rms_norm_eps,
            dtype,
            device=device,
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Projections of the layer's input: those of the compressor, weights of the heads."""
        return *self.compressor.linears, self.weights_proj

    def update(self, values: Tensor, scores: Tensor, cache: LayerCache, step: Step) -> None:
        """Take in the projections of the step's tokens: every step, also if none is scored."""
        pooled = self.compressor(values, scores, cache.state.indexer, step)
        ends = step.derive(_ends, self.rope, self.compressor.ratio)
        keys = rotate_(self.compressor.norm(pooled), ends.rotation)
        if self.quantized:
            keys = round_index(keys)
        cache.index_keys.write(step, ends.first, keys, ends.complete)

    def select(
        self,
        queries: Tensor,
        weights: Tensor,
        cache: LayerCache,
        step: Step,
        visible: Tensor,
        n: int,
    ) -> Tensor:
        """Choose among the first `n` entries.

        Args:
            queries: [B, C, heads * dim], `wq_b` of the normalised query latent; rotated in place.
            weights: [B, C, heads], `weights_proj` of the layer's input.
            visible: [B, C], entries each token may see.

        Returns:
            [B, C, topk] int64; the first min(visible, topk) of each token are chosen.
        """
        queries = queries.unflatten(-1, (self.heads, self.dim))
        queries = rotate_(queries, self.rope.tokens(step).unsqueeze(-2))
        if self.quantized:
            queries = round_index(queries)
        weights = weights * self.scale
        keys = cache.index_keys.all(step, n)
        rows, tokens = _parts(*queries.shape[:2], self.heads * n)
        chosen = [
            [
                self._best(q, w, keys[row], seen)
                for q, w, seen in zip(
                    queries[row].split(tokens, 1),
                    weights[row].split(tokens, 1),
                    visible[row].split(tokens, 1),
                )
            ]
            for row in rows
        ]
        return torch.cat([torch.cat(parts, dim=1) for parts in chosen])

    def _best(self, queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        entries = torch.arange(keys.shape[1], device=keys.device)
        causal = entries < visible.unsqueeze(-1)
        return topk_stable(_scores(queries, weights, keys), self.topk, causal)[0]


class _Ends(NamedTuple):
    """The K keys per request that may end within a step.

    Attributes:
        first: [B], number of the first.
        complete: [B, K] bool, whether the step's valid tokens reach its end.
        rotation: [B, K, rope_dim / 2] complex, of the first token of each.
    """

    first: Tensor
    complete: Tensor
    rotation: Tensor


def _ends(step: Step, rope: Rope, ratio: int) -> _Ends:
    first = step.starts // ratio
    count = -(-step.chunk // ratio)
    begins = (first[:, None] + torch.arange(count, device=first.device)) * ratio
    complete = begins + ratio <= (step.starts + step.lens)[:, None]
    return _Ends(first, complete, rope.at(begins))


def _parts(batch: int, chunk: int, per_token: int) -> tuple[list[slice], int]:
    """Rows of the batch and tokens per row that are scored at once, within the bound.

    A batch whose tokens do not fit side by side, one per row, is taken apart by rows too.
    """
    at_once = max(1, MAX_SCORE_ELEMENTS // per_token)
    rows = min(batch, at_once)
    tokens = min(chunk, max(1, at_once // rows))
    return [slice(row, row + rows) for row in range(0, batch, rows)], tokens


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[B, C, H, d], [B, C, H], [B, N, d] -> [B, C, N] fp32; rounded to their dtype on the way."""
    products = torch.einsum("bchd,bnd->bchn", queries, keys).relu_()
    return (products * weights.unsqueeze(-1)).sum(-2).float()
