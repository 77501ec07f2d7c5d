"""Choice of tokens from logits, repeatable per request and without a word from the host.

Sampling draws `argmax(p / e)` with `e ~ Exp(1)` per candidate, the exponential form of the Gumbel
trick that the official inference/generate.py uses. Here `e` is a pure function of (seed, position,
candidate) instead of a generator's state: a request draws the same tokens in any batch,
whether or not it was speculated, and after being recomputed, and the whole step stays free of host
work. Bias and penalties are added here; `sample_tokens` draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.ops.linear_argmax import FAILED  # in place of a token
from dsv4.ops.sample_tokens import sample_tokens


@dataclass(frozen=True)
class Penalties:
    """Penalties of the B rows of a forward for tokens that occurred.

    Attributes:
        repetition, presence, frequency: [B] fp32.
        prompted: [B, V] bool: tokens of the prompt.
        generated: [B, V] int32: how often the continuation holds each token.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    prompted: Tensor
    generated: Tensor

    def after(self, tokens: Tensor, kept: Tensor | None = None) -> Penalties:
        """Return them after some more tokens [B, n] int64, of which those `kept` [B, n] count;
        None: all do."""
        count = torch.ones_like(tokens, dtype=torch.int32) if kept is None else kept.to(torch.int32)
        return replace(self, generated=self.generated.scatter_add(1, tokens, count))

    def apply(self, logits: Tensor, following: Tensor | None) -> Tensor:
        """[B, C, V] fp32 -> the same; column j > 0 also counts the first j of `following`."""
        counts = self.generated[:, None]
        if following is not None:
            more = torch.zeros_like(logits, dtype=torch.int32)
            more[:, 1:].scatter_(2, following[..., None], 1)
            counts = counts + more.cumsum(1, dtype=torch.int32)
        occurred = counts > 0
        repetition, presence, frequency = (
            x[:, None, None] for x in (self.repetition, self.presence, self.frequency)
        )
        factor = torch.where(occurred | self.prompted[:, None], repetition, 1.0)
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        return logits - frequency * counts - presence * occurred


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the B rows of a forward, on the device.

    What no row needs is None, or flagged so that its code is left out; rows get the same tokens
    whether it is or not.

    Attributes:
        temperature: [B] fp32, 0 = greedy. None only where no row samples, like the next two.
        top_p: [B] fp32.
        seed: [B] int64.
        greedy: no row samples.
        nucleus: some row has top_p < 1.
        top_k: [B] int64, 0 = all.
        min_p: [B] fp32.
        penalties: for tokens that occurred.
        bias: token ids [B, n] int64 and what is added to their logits [B, n] fp32; a row's ids
            are distinct, but for those with 0.
        logprobs: alternatives whose log-probabilities a forward reports, or None.
    """

    temperature: Tensor | None
    top_p: Tensor | None
    seed: Tensor | None
    greedy: bool
    nucleus: bool
    top_k: Tensor | None = None
    min_p: Tensor | None = None
    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor] | None = None
    logprobs: int | None = None

    @property
    def takes_best(self) -> bool:
        """Whether nothing is wanted of the logits but each row's largest one."""
        changes = (self.penalties, self.bias, self.logprobs)
        return self.greedy and all(option is None for option in changes)

    def after(self, tokens: Tensor, kept: Tensor | None = None) -> SamplingBatch:
        """Return it for positions behind more tokens [B, n], of which those `kept` count; None:
        all do."""
        if self.penalties is None:
            return self
        return replace(self, penalties=self.penalties.after(tokens, kept))


GREEDY = SamplingBatch(None, None, None, greedy=True, nucleus=False)
"""Rows that all take the likeliest token."""


def sample(
    logits: Tensor, positions: Tensor, batch: SamplingBatch, following: Tensor | None = None
) -> Tensor:
    """Choose one token per row and column.

    Args:
        logits: [B, C, V] fp32.
        positions: [B, C] int64, position each chosen token will take in its request's sequence.
        batch: parameters of the B rows.
        following: [B, C - 1] int64: the tokens between the columns, which penalties count. None:
            there is one column.

    Returns:
        [B, C] int64 token ids; `FAILED` where a logit is NaN or every one is minus infinity.
        Depends on a row's own logits, positions and parameters alone.
    """
    if batch.bias is not None:
        ids, values = (x[:, None].expand(-1, logits.shape[1], -1) for x in batch.bias)
        logits = logits.scatter_add(2, ids, values)
    if batch.penalties is not None:
        logits = batch.penalties.apply(logits, following)
    if not batch.greedy:
        return sample_tokens(
            logits,
            positions,
            batch.temperature,
            batch.seed,
            top_p=batch.top_p if batch.nucleus else None,
            top_k=batch.top_k,
            min_p=batch.min_p,
        )
    best, likeliest = logits.max(-1)
    # A maximum is NaN where any value is.
    return torch.where(best > -math.inf, likeliest, FAILED)
