"""Results of a forward as one tensor, so that they come to the host in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.engine.logprobs import TokenLogprobs, packed_logprobs, unpacked_logprobs


def packed(
    sampled: Tensor, drafted: Sequence[Tensor], logits: Tensor | None, logprobs: int | None
) -> Tensor:
    """[B, C samples | accepted | k drafts | C times the log-probabilities] int64.

    Args:
        sampled: [B, C] int64.
        drafted: accepted [B] and drafts [B, k] int64; nothing in forwards without drafts, which
            leave both columns out.
        logits: [B, C, V] fp32, the model's; None where no log-probabilities are reported.
        logprobs: alternatives whose log-probabilities are reported; None: none at all.
    """
    parts = [sampled]
    if drafted:
        accepted, drafts = drafted
        parts += [accepted[:, None], drafts]
    if logprobs is not None:
        parts.append(packed_logprobs(logits, sampled, logprobs).flatten(1))
    return torch.cat(parts, dim=1) if len(parts) > 1 else sampled


def packed_width(chunk: int, drafts: int, logprobs: int | None, vocab_size: int) -> int:
    """Columns of `packed` for C = chunk and k = drafts."""
    bits = 0 if logprobs is None else 1 + 2 * min(logprobs, vocab_size)
    return chunk + bool(drafts) + drafts + chunk * bits


class RowResult(NamedTuple):
    """A row of a forward's results, on the host.

    Attributes:
        sampled: the token of each position, of which the first 1 + accepted hold.
        accepted: drafts that were.
        logprobs: bits of each position's log-probabilities, [C, 1 + 2 m] int64; or nothing.
    """

    sampled: list[int]
    accepted: int
    logprobs: np.ndarray

    @classmethod
    def of(cls, row: np.ndarray, chunk: int, drafts: int) -> RowResult:
        """Unpack a row of `packed`; C = chunk, k = drafts."""
        rest = row[chunk + bool(drafts) + drafts :]
        accepted = int(row[chunk]) if drafts else 0
        return cls(row[:chunk].tolist(), accepted, rest.reshape(chunk, rest.size // chunk))

    def token_logprobs(self, count: int, alternatives: int | None) -> list[TokenLogprobs] | None:
        """Log-probabilities of the first tokens, with so many alternatives; None: unwanted."""
        if alternatives is None:
            return None
        return [unpacked_logprobs(bits, alternatives) for bits in self.logprobs[:count]]
