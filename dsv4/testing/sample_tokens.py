"""`sample_tokens` under test: rows of logits of many kinds, and how they are sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.sampling.config import THREADS, VECTOR, SampleTokensConfig
from dsv4.ops.sample_tokens import SAMPLE_TOKENS, sample_tokens
from dsv4.testing.kernel_call import OpInputs

# By row; of lengths that make all kinds of rows meet.
TEMPERATURES = (0.8, 0.0, 1.3, 1e-7, 1.0, 0.6)
TOP_P = (0.9, 1.0, 0.3, 0.99, 1e-30)
TOP_K = (0, 0, 40, 3, 1 << 31, 0, 1, 7, 0, 20, 0)
MIN_P = (0.0, 0.0, 0.05, 0.0, 0.3, 0.0, 1e-4, 0.0, 0.0, 1.0, 0.0, 0.0, 0.01)


@dataclass(frozen=True)
class Case:
    """Sizes of a call.

    Attributes:
        rows, chunk, vocab_size: B, C and V.
        truncates: whether rows have top_p, top_k and min_p.
        padding: elements between the rows of logits, NaN; a multiple of 4.
    """

    rows: int
    chunk: int
    vocab_size: int
    truncates: bool = False
    padding: int = 0


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case.

    Rows take turns: a few likely tokens among many, tokens of about one probability, ties of the
    best, some masked, all equal, two vectors of a thread, an infinite logit, NaN, all masked.
    """

    op = SAMPLE_TOKENS

    case: Case
    logits: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    min_p: Tensor | None = None

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        rows, chunk, size = case.rows, case.chunk, case.vocab_size
        shape = rows, chunk, size + case.padding
        logits = torch.full(shape, math.nan)[..., :size]
        logits.copy_(torch.randn(rows, chunk, size, generator=generator))
        for number in range(rows * chunk):
            _shape_row(logits[number // chunk, number % chunk], number, generator)
        positions = torch.randint(1 << 20, (rows, chunk), generator=generator)
        seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
        temperature = _by_row(TEMPERATURES, rows)
        found = [logits, positions, temperature, seeds]
        if case.truncates:
            found += [_by_row(values, rows) for values in (TOP_P, TOP_K, MIN_P)]
        # As strided as they are: the gaps are part of the case.
        return cls(case, *(_moved(tensor, device) for tensor in found))

    def of(self, rows: slice | list[int]) -> Inputs:
        """The same of some requests alone."""
        names = ("logits", *self.given)
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def config(self) -> SampleTokensConfig:
        return SampleTokensConfig(self.case.vocab_size, self.case.truncates)

    @property
    def given(self) -> dict[str, Tensor]:
        """All but the logits, by the table's names."""
        names = ("positions", "temperature", "seed", "top_p", "top_k", "min_p")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def arguments(self) -> Mapping[str, Tensor | None]:
        return {"logits": self.logits, **self.given}


def _by_row(values: tuple, rows: int) -> Tensor:
    """Rows take turns with values."""
    return torch.tensor(values).repeat(-(-rows // len(values)))[:rows]


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    shape, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device).copy_(tensor)


def _shape_row(row: Tensor, number: int, generator: torch.Generator) -> None:
    kind = number % 9
    if kind == 0:
        row.mul_(4)
    elif kind == 1:
        row.mul_(1e-3)
    elif kind == 2:
        places = torch.randperm(len(row), generator=generator)[: 1 + len(row) // 50]
        row[places] = 9.0
    elif kind == 3:
        row[torch.rand(len(row), generator=generator) < 0.9] = -math.inf
        row[-1] = -2.0
    elif kind == 4:
        row[len(row) * 2 // 3] = math.inf
    elif kind == 5:
        row.fill_(0.5)
    elif kind == 6:
        # The first of a CTA.
        row.mul_(0.1)
        row[VECTOR : VECTOR * THREADS] = -math.inf
        row[VECTOR * (THREADS + 1) :] = -math.inf
    elif kind == 7:
        row[len(row) // 2] = math.nan
        row[0] = math.inf
    else:
        row.fill_(-math.inf)


def expected(inputs: Inputs) -> Tensor:
    """What the torch implementation gives on the CPU."""
    arguments = {name: tensor.cpu() for name, tensor in inputs.arguments.items()}
    return sample_tokens(**arguments)
