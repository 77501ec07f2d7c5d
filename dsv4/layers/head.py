"""Ends of the model: embedding of tokens, and streams to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.layers.hyper_connection import HyperConnection, HyperParameters, Streams
from dsv4.layers.linear import Linear
from dsv4.layers.module import Module, empty_parameter
from dsv4.layers.norm import RMSNorm


class Embedding(Module):
    """Row lookup. `weight` [vocab_size, hidden_size]."""

    plain = ("weight",)

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., hidden_size]."""
        if not 1 < ids.numel() <= 16:
            return F.embedding(ids, self.weight)
        # On a GPU F.embedding takes so few rows one after another: 7.9 us of 16, indexing 1.7. By
        # one dimension, because rows lie as their indices do.
        return self.weight[ids.flatten()].unflatten(0, ids.shape)


def logits_of(
    streams: Streams,
    hyper: HyperConnection,
    parameters: HyperParameters,
    norm: RMSNorm,
    head: Linear,
) -> tuple[Tensor, Tensor]:
    """Collapse streams, normalise and project in fp32.

    Returns:
        Logits [B, C, vocab_size] fp32, and the streams [B, C, hc, D] with the last sublayer's
        output written to them, which the collapse does on its way.
    """
    x, streams = hyper.read(streams, parameters, norm)
    return head(x), streams.values


def best_of(
    streams: Streams,
    hyper: HyperConnection,
    parameters: HyperParameters,
    norm: RMSNorm,
    head: Linear,
) -> tuple[Tensor, Tensor] | None:
    """Ids with the largest logits, and the streams as `logits_of` has them.

    Returns:
        Ids [B, C] int64, -1 where a logit is NaN or all are minus infinity; None where a kernel
        does not find them without logits.
    """
    if not head.has_argmax(streams.values):
        return None
    x, streams = hyper.read(streams, parameters, norm)
    return head.argmax(x), streams.values
