"""The router: which experts a token uses and with which weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.layers.module import Module, empty_parameter
from dsv4.ops.moe.torch_path import route

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig


class Router(Module):
    """Scores sqrt(softplus(W x)), computed in fp32.

    Experts are the best by score + bias (the lower id of equals), or, in hash-routed layers, those
    a table lists for the token's id. Either way the weights are the chosen scores, without bias,
    normalised to a sum of `routed_scaling_factor`.

    Attributes:
        weight: [experts, hidden_size] in the dtype of the activations.
        bias: [experts] fp32; only selects. None in hash-routed layers.
        tid2eid: [vocab_size, experts per token] int64; None but in hash-routed layers.
    """

    plain = ("weight",)

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.topk = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        experts = config.n_routed_experts
        self.weight = empty_parameter((experts, config.hidden_size), dtype, device)
        self.hash_routed = spec.hash_routed
        self.bias = self.tid2eid = None
        if spec.hash_routed:
            self.tid2eid = empty_parameter((config.vocab_size, self.topk), torch.int64, device)
        else:
            self.bias = empty_parameter((experts,), torch.float32, device)

    def choice(self, input_ids: Tensor) -> dict[str, Tensor | None]:
        """What chooses experts, by the names of `route` and `moe`; ids [T] int64."""
        ids = input_ids if self.hash_routed else None
        return {"bias": self.bias, "table": self.tid2eid, "input_ids": ids}

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens in plain torch.

        Args:
            x: [T, hidden_size].
            input_ids: [T] int64, the tokens' ids; read in hash-routed layers.

        Returns:
            Experts [T, topk] int64, ascending, and their weights [T, topk] fp32.
        """
        options = {"top_k": self.topk, "scaling": self.scaling, **self.choice(input_ids)}
        return route(x, self.weight, **options)
