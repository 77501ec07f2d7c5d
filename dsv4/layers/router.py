"""The router: which experts a token uses and with which weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.layers.module import Module, empty_parameter
from dsv4.ops.topk import topk_stable

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig


class Router(Module):
    """Scores sqrt(softplus(W x)), computed in fp32.

    Experts are the best by score + bias (the lower id of equals), or, in hash-routed layers, those
    a table lists for the token's id. Either way the weights are the chosen scores, without bias,
    normalised to a sum of `routed_scaling_factor`.

    Attributes:
        weight: [experts, hidden_size] fp32.
        bias: [experts] fp32; only selects. Absent in hash-routed layers.
        tid2eid: [vocab_size, experts per token] int64; only in hash-routed layers.
    """

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.topk = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        experts = config.n_routed_experts
        self.weight = empty_parameter((experts, config.hidden_size), torch.float32, device)
        self.hash_routed = spec.hash_routed
        if spec.hash_routed:
            self.tid2eid = empty_parameter((config.vocab_size, self.topk), torch.int64, device)
        else:
            self.bias = empty_parameter((experts,), torch.float32, device)

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens.

        Args:
            x: [T, hidden_size].
            input_ids: [T] int64, the tokens' ids; read in hash-routed layers.

        Returns:
            Experts [T, topk] int64 and their weights [T, topk] fp32.
        """
        scores = F.softplus(F.linear(x.float(), self.weight)).sqrt()
        if self.hash_routed:
            experts = self.tid2eid[input_ids]
        else:
            biased = scores + self.bias
            experts, _ = topk_stable(biased, self.topk, torch.ones_like(biased, dtype=torch.bool))
        chosen = scores.gather(-1, experts)
        return experts, chosen * (self.scaling / chosen.sum(-1, keepdim=True))
