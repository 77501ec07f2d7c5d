"""`linear_argmax` under test: inputs, and what they must give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.ops.linear_argmax import FAILED, LINEAR_ARGMAX
from dsv4.testing import fp8_linear as fp8
from dsv4.testing import plain_linear
from dsv4.testing.kernel_call import OpInputs


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a call: those of `plain_linear`.

    Attributes:
        writes: whether y is written, too.
    """

    op = LINEAR_ARGMAX

    plain: plain_linear.Inputs
    writes: bool = True

    @classmethod
    def make(cls, case: fp8.Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """As those of `plain_linear`; rows of the weight's first half are there twice, so that
        there are ties."""
        plain = plain_linear.Inputs.make(case, seed, device)
        half = case.out_features // 2
        plain.weight[half : 2 * half].copy_(plain.weight[:half])
        return cls(plain)

    def first(self, tokens: int) -> Inputs:
        """The same with the first tokens alone."""
        return replace(self, plain=self.plain.first(tokens))

    @property
    def config(self) -> PlainLinearConfig:
        return self.plain.config

    @property
    def arguments(self) -> dict[str, Tensor]:
        return self.plain.arguments

    @property
    def wanted(self) -> tuple[str, ...]:
        return ("out",) if self.writes else ()


def rows_of(y: Tensor) -> Tensor:
    """First row of each token's largest y, or `FAILED`."""
    numbers = torch.arange(y.shape[1], device=y.device)
    best = y.amax(-1, keepdim=True)
    first = torch.where(y == best, numbers, y.shape[1]).amin(-1)
    return torch.where(best.squeeze(-1) > -math.inf, first, FAILED)
