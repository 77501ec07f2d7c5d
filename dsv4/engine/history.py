"""Tokens that occurred in each request, as penalties count them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.staging import upload


class History:
    """Tokens of prompts and continuations by slot, on the device.

    Attributes:
        prompted: [rows, V] bool: tokens of the prompt.
        generated: [rows, V] int32: how often the continuation holds each token.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.prompted = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)

    def start(self, row: int, prompt: Sequence[int], continuation: Sequence[int]) -> None:
        """Begin a row anew."""
        device = self.prompted.device
        seen, made = (
            upload(np.array(ids, dtype=np.int64), device) for ids in (prompt, continuation)
        )
        self.prompted[row].zero_().index_fill_(0, seen, True)
        self.generated[row].zero_()
        self.generated[row].scatter_add_(0, made, torch.ones_like(made, dtype=torch.int32))

    def add(self, rows: Tensor, tokens: Tensor, kept: Tensor) -> None:
        """Count tokens [B, n] int64 of rows [B] int64, those that are `kept` [B, n]."""
        index = (rows[:, None] * self.generated.shape[1] + tokens).flatten()
        self.generated.view(-1).scatter_add_(0, index, kept.flatten().to(torch.int32))
