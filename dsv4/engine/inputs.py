"""The inputs of an engine's forward, and their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.staging import StagedTensor
from dsv4.cache.step import Step
from dsv4.engine.sampler import RowSampling, SamplingBatch

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


class InputStage:
    """Device memory for the inputs of one forward at a time; inputs of one shape share addresses.

    Args:
        positions: B * C of the largest forward.
        rows: B of the forward with the most rows.
    """

    def __init__(self, positions: int, rows: int, device: torch.device) -> None:
        self._ints = StagedTensor(2 * positions + rows, torch.int64, device)
        self._floats = StagedTensor(2 * rows, torch.float32, device)

    def fill(
        self,
        step: Step,
        sampling: Sequence[RowSampling],
        tokens: Sequence[list[int]],
        next_tokens: Sequence[list[int]] = (),
    ) -> ForwardInputs:
        """Send the inputs of `step`; what the lists leave open is 0, and samples greedily.

        Args:
            sampling: per request, at most B.
            tokens, next_tokens: per request, at most C each.

        Returns:
            Inputs that are valid until the next are filled.
        """
        rows, chunk = step.batch, step.chunk
        size = 2 * rows * chunk + rows
        ints = self._ints.writable()[:size]
        ints[:] = 0
        grids, seeds = _split(ints, rows, chunk)
        for grid, lines in zip(grids, (tokens, next_tokens)):
            for row, line in zip(grid, lines):
                row[: len(line)] = line
        floats = self._floats.writable()[: 2 * rows].reshape(2, rows)
        floats[:] = [[0.0], [1.0]]
        for row, (temperature, top_p, seed) in enumerate(sampling):
            floats[:, row] = temperature, top_p
            seeds[row] = seed

        grids, seeds = _split(self._ints.upload(size), rows, chunk)
        temperature, top_p = self._floats.upload(2 * rows).view(2, rows)
        batch = SamplingBatch(
            temperature,
            top_p,
            seeds,
            greedy=all(row.temperature == 0 for row in sampling),
            nucleus=any(row.top_p < 1 for row in sampling),
        )
        return ForwardInputs(step, *grids, batch)


def _split(flat, rows: int, chunk: int):
    """Tokens and next tokens [2, rows, chunk], seeds [rows]: one array, so one copy."""
    grid = 2 * rows * chunk
    return flat[:grid].reshape(2, rows, chunk), flat[grid:]
