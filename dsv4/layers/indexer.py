"""The lightning indexer: which compressed entries a query attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.step import Step
from dsv4.layers.compressor import Compressor
from dsv4.layers.linear import Linear, Rounded, linear_options
from dsv4.layers.module import Module
from dsv4.layers.rope import Rope
from dsv4.ops import IndexRounding, index_scales, index_topk
from dsv4.ops.index_rounding import takes_index_heads

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig


class Indexer(Module):
    """Scores I[t, n] = sum over heads of w[t, h] * relu(q[t, h] . k[n]) and keeps the best.

    Keys are entries of a compressor of its own. Equal scores: the earlier entry wins.

    Attributes:
        has_coded_queries: whether queries leave their projection as codes where it has an epilogue
            for them; else scores round a query in every CTA that takes its token up. The same
            entries; which is faster: docs/design/linears.md, "Epilogues of a weight".
    """

    has_coded_queries = False

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

    def rounding(self, latent: Tensor | Rounded, step: Step) -> IndexRounding | None:
        """The epilogue of `wq_b` that makes codes of queries, where it is asked for and there for
        such latents."""
        if not (isinstance(latent, Rounded) and self.wq_b.takes_codes(latent.values)):
            return None
        if not (
            self.has_coded_queries and self.quantized and takes_index_heads(self.dim, self.rope.dim)
        ):
            return None
        device = latent.codes.device
        scales = index_scales(latent.codes.shape[0], self.heads, device)
        return IndexRounding(self.rope.table(step.capacity, device), step.token_positions, scales)

    def select(
        self,
        queries: Tensor,
        weights: Tensor,
        lens: Tensor,
        cache: LayerCache,
        step: Step,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Choose among the entries that each of the T = B * C tokens sees.

        Args:
            queries: [B, C, heads * dim], `wq_b` of the normalised query latent, or its codes.
            weights: [B, C, heads], `weights_proj` of the layer's input.
            lens: [T] int32, entries that each token sees.
            scales: [T, heads] of codes.

        Returns:
            Slots [T, topk] int32 in ascending order of entries, -1 behind the last.
        """
        return index_topk(
            queries.flatten(0, 1),
            weights.flatten(0, 1),
            self.rope.table(step.capacity, queries.device),
            step.token_positions,
            lens,
            step.request_ids,
            step.pages,
            cache.index_keys.data,
            q_scale=scales,
            topk=self.topk,
            weight_scale=self.scale,
            is_rounded=self.quantized,
            # What a float32 model computes in float32 for is not rounded away.
            rank="bf16" if weights.dtype == torch.bfloat16 else "fp32",
            gives_slots=True,
            max_entries=step.capacity // self.compressor.ratio,
        )
