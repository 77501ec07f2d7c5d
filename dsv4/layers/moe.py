"""Mixture of experts: routed experts plus one that every token uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.layers.experts import Experts, swiglu
from dsv4.layers.linear import Linear, linear_options
from dsv4.layers.module import Module
from dsv4.layers.router import Router

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig

MAX_STATIC_CHUNK = 16
"""Longest chunk that is routed without reading the routing back: decode and draft verification."""


class SharedExpert(Module):
    """w2(silu(w1 x) * w3 x), with the clamps of the routed experts."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        options = linear_options(config, dtype, device)
        self.limit = config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, **options)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, **options)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(Module):
    """The feed-forward part of a layer."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate = Router(config, spec, device)
        self.experts = Experts(config, scheme=config.expert_scheme, dtype=dtype, device=device)
        self.shared_experts = SharedExpert(config, dtype, device)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """Apply to tokens `x` [B, C, hidden_size] with ids [B, C]; summed in fp32."""
        flat = x.flatten(0, 1)
        experts, weights = self.gate(flat, input_ids.flatten())
        routed = self.experts(flat, experts, weights, static=x.shape[1] <= MAX_STATIC_CHUNK)
        return (routed + self.shared_experts(flat).float()).to(x.dtype).view_as(x)
