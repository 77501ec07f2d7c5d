"""Multi-token prediction: one more layer that drafts the token after the next."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.model_cache import ModelCache
from dsv4.cache.step import Step
from dsv4.config.layer_schedule import LayerSpec
from dsv4.config.model_config import ModelConfig
from dsv4.layers.block import Block
from dsv4.layers.head import Embedding, best_of, logits_of
from dsv4.layers.hyper_connection import (
    Streams,
    hyper_parameters,
    register_hyper_parameters,
)
from dsv4.layers.linear import Linear, Rounded, linear_options
from dsv4.layers.norm import RMSNorm
from dsv4.layers.reductions import full_precision_sums
from dsv4.ops import rms_norm_fp8


class MTPBlock(Block):
    """A sliding-window layer over the main model's final streams and the tokens that follow.

    At position t it takes the streams X_t (before the head collapses them) and the embedding of
    token t + 1, rotates at t, and predicts token t + 2. For a chain of drafts its own output
    streams take the place of X (technical report, section 2; official inference/model.py).

    Args:
        embed, head: the main model's, shared.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        embed: Embedding,
        head: Linear,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(config, spec, dtype, device)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        options = linear_options(config, dtype, device)
        self.e_proj = Linear(hidden, hidden, **options)
        self.h_proj = Linear(hidden, hidden, **options)
        self.enorm = RMSNorm(hidden, eps, device)
        self.hnorm = RMSNorm(hidden, eps, device)
        self.norm = RMSNorm(hidden, eps, device)
        register_hyper_parameters(
            self, "hc_head", config.hc_mult, config.hc_mult * hidden, 1, device
        )
        # In a tuple, so that the state dict does not list the shared parameters a second time.
        self._shared = (embed, head)

    def forward(self, streams: Tensor, next_ids: Tensor, cache: ModelCache, step: Step) -> Tensor:
        """Predict from the streams of the step's positions.

        Args:
            streams: [B, C, hc, hidden_size], of the main model, or of this block in a chain.
            next_ids: [B, C] int64, the token after each position; any valid id for padding.
            cache: the model's; the block has a layer of its own in it.
            step: as for the main model's forward of the same positions.

        Returns:
            Streams [B, C, hc, hidden_size], for `logits` and for the next draft of a chain.
        """
        return self.hyper.written(self.unwritten_streams(streams, next_ids, cache, step))

    @full_precision_sums
    def unwritten_streams(
        self, streams: Tensor, next_ids: Tensor, cache: ModelCache, step: Step
    ) -> Streams:
        """`forward`, the last sublayer's output still to be written to the streams."""
        embed, _ = self._shared
        token = self.e_proj(rounded_norm(embed(next_ids), self.enorm, self.e_proj))
        mixed = token.unsqueeze(-2) + self.h_proj(rounded_norm(streams, self.hnorm, self.h_proj))
        layer_cache = cache.layers[self.index]
        return super().forward(Streams(mixed), next_ids, layer_cache, cache.prepared(step))

    def logits(self, streams: Tensor) -> Tensor:
        """Return the logits of token t + 2, [B, C, vocab_size] fp32, of the block's streams."""
        return self.outputs(Streams(streams))[0]

    @full_precision_sums
    def outputs(self, streams: Streams) -> tuple[Tensor, Tensor]:
        """Return `logits`, and the streams [B, C, hc, hidden_size] as `forward` has them."""
        _, head = self._shared
        return logits_of(streams, self.hyper, hyper_parameters(self, "hc_head"), self.norm, head)

    @full_precision_sums
    def best(self, streams: Streams) -> tuple[Tensor, Tensor] | None:
        """Return the likeliest tokens t + 2 of the block's streams, as `best_of`."""
        _, head = self._shared
        return best_of(streams, self.hyper, hyper_parameters(self, "hc_head"), self.norm, head)


def rounded_norm(x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor | Rounded:
    """norm(x) [..., dim] as a linear multiplies it, by one launch where both are kernels."""
    if not linear.takes_codes(x):
        return norm(x)
    rows = x.reshape(-1, x.shape[-1])
    codes, scale, values = rms_norm_fp8(rows, norm.weight, eps=norm.eps, return_norm=True)
    return Rounded(values.view(x.shape), codes, scale)
