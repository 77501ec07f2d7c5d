"""The inputs of an engine's forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dsv4.cache.staging import upload
from dsv4.cache.step import Step
from dsv4.engine.sampler import SamplingBatch

SAMPLED_HERE = -1  # a next token that is not known before the forward itself samples it


@dataclass(frozen=True)
class ForwardInputs:
    """Input tensors of a forward over [B, C] positions.

    Attributes:
        step: positions and cache rows.
        tokens: [B, C] int64; padding is any valid id.
        next_tokens: [B, C] int64, the token after each position, `SAMPLED_HERE` where the forward
            chooses it. Only prefill with drafts reads it.
        sampling: how each row samples.
    """

    step: Step
    tokens: Tensor
    next_tokens: Tensor
    sampling: SamplingBatch


def known_inputs(
    step: Step,
    sampling: SamplingBatch,
    tokens: Sequence[list[int]],
    next_tokens: Sequence[list[int]] = (),
) -> ForwardInputs:
    """Inputs of tokens that the host knows; what the lists leave open is 0.

    Args:
        tokens, next_tokens: per request, at most C each.
    """
    grids = np.zeros((2, step.batch, step.chunk), dtype=np.int64)
    for grid, lines in zip(grids, (tokens, next_tokens)):
        for row, line in zip(grid, lines):
            row[: len(line)] = line
    return ForwardInputs(step, *upload(grids, step.starts.device), sampling)
