"""`plain_linear` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.ops.plain_linear import PLAIN_LINEAR
from dsv4.reference import linear as oracle
from dsv4.testing import fp8_linear as fp8
from dsv4.testing.kernel_call import OpInputs
from dsv4.testing.merged_linear import SUM_ERROR


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a call: x [T, K] and weight [M, K].

    Attributes:
        out_dtype: of the result.
    """

    op = PLAIN_LINEAR

    x: Tensor
    weight: Tensor
    out_dtype: str = "float32"

    @classmethod
    def make(cls, case: fp8.Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """Of the sizes, rows and strides of an FP8 linear's case."""
        generator = torch.Generator(device).manual_seed(seed)
        x = fp8.make_x(case, generator)
        shape = (case.out_features, case.in_features)
        weight = torch.randn(shape, generator=generator, device=device).bfloat16()
        if case.is_strided:
            x, weight = fp8.spread_rows(x), fp8.spread_rows(weight)
        return cls(x, weight, case.out_dtype)

    def first(self, tokens: int) -> Inputs:
        """The same with the first tokens alone."""
        return replace(self, x=self.x[:tokens])

    @property
    def config(self) -> PlainLinearConfig:
        return PlainLinearConfig(self.x.shape[1], self.weight.shape[0], self.out_dtype)

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {"x": self.x, "weight": self.weight}


def assert_plain_close(actual: Tensor, inputs: Inputs) -> None:
    """Fail where y is further from the oracle than rounding and fp32 sums allow."""
    expected = oracle.plain_linear(inputs.x, inputs.weight)
    magnitude = oracle.plain_linear(inputs.x.abs(), inputs.weight.abs())
    allowed = expected.abs() * fp8.ROUNDING[inputs.out_dtype] + magnitude * SUM_ERROR
    fp8.assert_within(actual, expected, allowed, "y")
