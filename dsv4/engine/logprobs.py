"""Log-probabilities of chosen tokens and of their best alternatives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one token, of the model's own logits.

    Attributes:
        logprob: of the token that was chosen.
        top: ids and log-probabilities of the likeliest tokens, the best first.
    """

    logprob: float
    top: list[tuple[int, float]]


def packed_logprobs(logits: Tensor, tokens: Tensor, alternatives: int) -> Tensor:
    """Log-probabilities of tokens, with other results in one tensor.

    Args:
        logits: [B, C, V] fp32, the model's.
        tokens: [B, C] int64; those below 0 get the log-probability of token 0.
        alternatives: n, at most V count.

    Returns:
        [B, C, 1 + 2 m] int64, m = min(n, V): bits of the token's log-probability, bits of those of
        the m likeliest, their ids.
    """
    values = torch.log_softmax(logits, dim=-1)
    parts = [_bits(values.gather(-1, tokens.clamp_min(0)[..., None]))]
    if alternatives:
        top = values.topk(min(alternatives, values.shape[-1]), dim=-1)
        parts += [_bits(top.values), top.indices]
    return torch.cat(parts, dim=-1)


def unpacked_logprobs(row: np.ndarray, alternatives: int) -> TokenLogprobs:
    """Unpack [1 + 2 m] int64 of one token.

    Args:
        alternatives: how many of the m likeliest are wanted.
    """
    count = len(row) // 2
    reals = row[: 1 + count].astype(np.int32).view(np.float32).tolist()
    ids = row[1 + count :].tolist()
    return TokenLogprobs(reals[0], list(zip(ids, reals[1:]))[:alternatives])


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).long()
