"""`grouped_linear` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import K_BLOCK, num_code_rows
from dsv4.kernels.gemm.grouped_config import CODES, GroupedLinearConfig
from dsv4.ops.code_terms import own_rows, to_terms
from dsv4.ops.grouped_linear import GROUPED_LINEAR
from dsv4.ops.quantize import quantize_e4m3
from dsv4.reference import linear as oracle
from dsv4.reference.weights import decode_fp8
from dsv4.testing import fp8_linear as fp8
from dsv4.testing.kernel_call import OpInputs

LEFT = 2.0**-21  # of the largest of 128 values, by two terms


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        tokens: T.
        in_features, group_rows, groups, act, scale_dtype, out_dtype, x_dtype: as in
            `GroupedLinearConfig`.
        has_special_rows, is_strided: as in `testing.fp8_linear.Case`.
    """

    tokens: int
    in_features: int
    group_rows: int
    groups: int
    act: str = "bf16"
    scale_dtype: str = "float8_e8m0fnu"
    out_dtype: str = "bfloat16"
    x_dtype: str = "bfloat16"
    has_special_rows: bool = False
    is_strided: bool = False

    @property
    def config(self) -> GroupedLinearConfig:
        return GroupedLinearConfig(
            self.in_features, self.group_rows, self.groups,
            self.act, self.scale_dtype, self.out_dtype, self.x_dtype,
        )  # fmt: skip

    @property
    def whole(self) -> fp8.Case:
        """x of all groups, beside a weight with the rows of one."""
        return fp8.Case(
            self.tokens,
            self.groups * self.in_features,
            self.group_rows,
            has_special_rows=self.has_special_rows,
        )

    @property
    def stacked(self) -> fp8.Case:
        """The weight, beside x of one group."""
        rows = self.groups * self.group_rows
        return fp8.Case(self.tokens, self.in_features, rows, scale_dtype=self.scale_dtype)


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case.

    Attributes:
        x: in bfloat16, also where a call takes its codes.
        has_scratch: whether launches have room to quantise many tokens into.
    """

    op = GROUPED_LINEAR

    case: Case
    x: Tensor
    weight: Tensor
    scale: Tensor
    has_scratch: bool = True

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x = fp8.make_x(case.whole, generator)
        scale = fp8.make_scale(case.stacked, generator)
        shape = (case.groups * case.group_rows, case.in_features)
        weight = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
        if case.is_strided:
            x, weight = fp8.spread_rows(x), fp8.spread_rows(weight)
        return cls(case, x, weight, scale)

    def first(self, tokens: int) -> Inputs:
        """The same with the first tokens alone."""
        return replace(self, case=replace(self.case, tokens=tokens), x=self.x[:tokens])

    @property
    def config(self) -> GroupedLinearConfig:
        return self.case.config

    @property
    def arguments(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("x", "weight", "scale")}
        if not self.config.quantizes:
            found["x"], found["x_scale"] = self._codes()
        elif self.has_scratch:
            # Its rows are not those of x.
            shape = (num_code_rows(self.x.shape[0], self.config.terms), self.x.shape[1])
            codes = torch.zeros(shape, dtype=torch.uint8, device=self.x.device)
            found["codes"] = codes.fill_(0x7F).view(torch.float8_e4m3fn)
        return found

    def _codes(self) -> tuple[Tensor, Tensor]:
        """Codes of x, NaN in rows of no token, and their scales."""
        if self.config.terms == 1:
            return quantize_e4m3(self.x, K_BLOCK)
        codes, scales = to_terms(self.x)
        codes.view(torch.uint8)[~own_rows(self.x.shape[0]).to(codes.device)] = 0x7F
        return codes, scales

    @property
    def sizes(self) -> dict[str, int]:
        return {"T": self.x.shape[0]}

    @property
    def wanted(self) -> tuple[str, ...]:
        has_scratch = self.has_scratch and self.config.quantizes
        scratch = ("code_scales",) if has_scratch else ()
        return (*scratch, *(("out_scale",) if self.config.rounds_output else ()))

    @property
    def in_bfloat16(self) -> Inputs:
        """The same with outputs that are not rounded to codes."""
        return replace(self, case=replace(self.case, out_dtype="bfloat16"))

    @property
    def of_codes(self) -> Inputs:
        """The same given in codes."""
        return replace(self, case=replace(self.case, x_dtype=CODES))

    @property
    def padding(self) -> int:
        return fp8.PADDING if self.case.is_strided else 0

    def expected(self) -> Tensor:
        """y [T, M] in fp64."""
        rounds = self.case.act == "fp8"
        return oracle.grouped_linear(
            self.x, self.weight, self.scale, self.case.groups, rounds=rounds
        )

    def magnitude(self) -> Tensor:
        """Of each element, `block_magnitudes` of its terms."""
        x = self.x.double()
        if self.case.act == "fp8":
            codes, scales = quantize_e4m3(self.x, K_BLOCK)
            x = codes.double() * scales.double().repeat_interleave(K_BLOCK, 1)
        weight = decode_fp8(self.weight, self.scale, (K_BLOCK, K_BLOCK)).double()
        groups = x.unflatten(1, (self.case.groups, -1)).transpose(0, 1)
        found = fp8.block_magnitudes(groups, weight.unflatten(0, (self.case.groups, -1)))
        return found.transpose(0, 1).flatten(1)

    def lost(self) -> Tensor:
        """What the second terms leave, at most: `LEFT` of a group's largest value, which weighs
        where the weight beside that is zero."""
        largest = self.x.abs().unflatten(1, (-1, K_BLOCK)).amax(-1)
        left = (largest.double() * LEFT).nan_to_num(0.0, 0.0).repeat_interleave(K_BLOCK, 1)
        weight = self.weight.float().abs().to(torch.float8_e4m3fn)
        return oracle.grouped_linear(left, weight, self.scale, self.case.groups)


def assert_grouped_close(actual: Tensor, inputs: Inputs) -> None:
    """Fail where y is further from the oracle than rounding, the accumulator and second terms
    allow."""
    expected = inputs.expected()
    rounding = fp8.ROUNDING[inputs.case.out_dtype]
    allowed = expected.abs() * rounding + inputs.magnitude() * fp8.SUM_ERROR
    if inputs.case.act == "bf16":
        allowed = allowed + inputs.lost()
    fp8.assert_within(actual, expected, allowed, "y")
