"""`merged_linear` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import K_BLOCK, Kind
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.ops.merged_linear import MERGED_LINEAR
from dsv4.ops.quantize import quantize_e4m3
from dsv4.reference import linear as oracle
from dsv4.testing import fp8_linear as fp8
from dsv4.testing.harness import Outcome
from dsv4.testing.kernel_call import OpInputs

# Error of a sum of bf16 products, relative to the sum of its terms' magnitudes: the tensor core
# aligns the terms of a step to the largest one.
SUM_ERROR = 2**-20


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        tokens, in_features: T and K.
        weights: as in `MergedLinearConfig`.
        has_codes: whether x comes in e4m3, too.
        has_special_rows, is_strided: as in `testing.fp8_linear.Case`.
    """

    tokens: int
    in_features: int
    weights: str
    has_codes: bool = False
    has_special_rows: bool = False
    is_strided: bool = False

    @cached_property
    def config(self) -> MergedLinearConfig:
        return MergedLinearConfig(self.in_features, self.weights, self.has_codes)

    @property
    def linears(self) -> list[fp8.Case]:
        """Each FP8 weight as a case of its own."""
        return [
            fp8.Case(
                self.tokens,
                self.in_features,
                weight.rows,
                scale_dtype=weight.stored,
                out_dtype=weight.out_dtype,
                has_special_rows=self.has_special_rows,
                is_strided=self.is_strided,
            )
            for weight in self.config.fp8
        ]


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case.

    Attributes:
        linears: inputs of each FP8 weight, which share x.
        plain: the other weights.
        has_scratch: whether launches have room to quantise many tokens into.
    """

    op = MERGED_LINEAR

    case: Case
    x: Tensor
    linears: tuple[fp8.Inputs, ...]
    plain: tuple[Tensor, ...]
    has_scratch: bool = True

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        linears = [fp8.Inputs.make(part, seed + i, device) for i, part in enumerate(case.linears)]
        x = linears[0].x
        linears = tuple(replace(part, x=x, wide=x) for part in linears)
        generator = torch.Generator(device).manual_seed(seed + len(linears))
        plain = [
            torch.randn(
                (weight.rows, case.in_features), generator=generator, device=device
            ).bfloat16()
            for weight in case.config.plain
        ]
        if case.is_strided:
            plain = [fp8.spread_rows(weight) for weight in plain]
        return cls(case, x, linears, tuple(plain))

    def first(self, tokens: int) -> Inputs:
        """The same with the first tokens alone."""
        linears = tuple(part.first(tokens) for part in self.linears)
        case = replace(self.case, tokens=tokens)
        return replace(self, case=case, x=self.x[:tokens], linears=linears)

    @property
    def config(self) -> MergedLinearConfig:
        return self.case.config

    @property
    def codes(self) -> dict[str, Tensor]:
        """x in e4m3, where the case has it."""
        if not self.case.has_codes:
            return {}
        codes, scales = quantize_e4m3(self.x, K_BLOCK)
        return {"x_codes": codes, "x_scale": scales.to(torch.float8_e8m0fnu)}

    @property
    def arguments(self) -> dict[str, Tensor]:
        found = {"x": self.x, **self.codes}
        for i, part in enumerate(self.linears):
            found |= {f"weight_{i}": part.weight, f"scale_{i}": part.scale}
        return found | {f"plain_{i}": weight for i, weight in enumerate(self.plain)}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the weights."""
        fp8_names = [f"out_{i}" for i in range(len(self.linears))]
        return (*fp8_names, *(f"plain_out_{i}" for i in range(len(self.plain))))

    @property
    def wanted(self) -> tuple[str, ...]:
        has_scratch = self.has_scratch and not self.case.has_codes
        scratch = ("codes", "code_scales") if has_scratch else ()
        return (*self.outputs[1:], *scratch)

    @property
    def padding(self) -> int:
        return fp8.PADDING if self.case.is_strided else 0


def assert_merged_close(outcome: Outcome | dict[str, Tensor], inputs: Inputs) -> None:
    """Fail where an output is further from its oracle than rounding and accumulators allow."""
    for i, part in enumerate(inputs.linears):
        fp8.assert_linear_close(outcome[f"out_{i}"], part)
    plain = inputs.case.config.of_kind(Kind.BF16)
    for i, (weight, described) in enumerate(zip(inputs.plain, plain)):
        expected = oracle.plain_linear(inputs.x, weight)
        magnitude = oracle.plain_linear(inputs.x.abs(), weight.abs())
        allowed = expected.abs() * fp8.ROUNDING[described.out_dtype] + magnitude * SUM_ERROR
        fp8.assert_within(outcome[f"plain_out_{i}"], expected, allowed, f"plain_out_{i}")
