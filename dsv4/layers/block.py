"""One decoder layer: attention and mixture of experts on hyper-connected streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.step import Step
from dsv4.layers.attention import Attention
from dsv4.layers.hyper_connection import (
    HyperConnection,
    Streams,
    hyper_parameters,
    register_hyper_parameters,
)
from dsv4.layers.module import Module
from dsv4.layers.moe import MoE
from dsv4.layers.norm import RMSNorm

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig


class Block(Module):
    """A decoder layer. Each sublayer reads one mixture of the streams and writes to all of them."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.index = spec.index
        # Behind the last layer there is no seam that adds the rows of experts.
        self.is_last = spec.is_mtp or spec.index + 1 == config.num_hidden_layers
        self.hyper = HyperConnection.of(config)
        self.attn = Attention(config, spec, dtype, device)
        self.ffn = MoE(config, spec, dtype, device)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        hc = config.hc_mult
        for name in ("hc_attn", "hc_ffn"):
            register_hyper_parameters(self, name, (2 + hc) * hc, hc * config.hidden_size, 3, device)

    def forward(
        self, streams: Streams, input_ids: Tensor, cache: LayerCache, step: Step
    ) -> Streams:
        """Streams [B, C, hc, hidden_size] -> the same, `ffn`'s output still to be written;
        `input_ids` [B, C] int64."""
        x, streams = self.hyper.read(
            streams,
            hyper_parameters(self, "hc_attn"),
            self.attn_norm,
            quantize=self.attn.wq_a.takes_codes(streams.values),
        )
        streams = streams.after(self.attn(x, cache, step))
        x, streams = self.hyper.read(
            streams,
            hyper_parameters(self, "hc_ffn"),
            self.ffn_norm,
            quantize=self.ffn.takes_codes(input_ids.numel()),
        )
        # The next layer's first seam adds the rows of experts.
        return streams.after(self.ffn(x, input_ids, step.live_tokens, combine=self.is_last))
