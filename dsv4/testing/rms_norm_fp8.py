"""`rms_norm_fp8` under test: inputs of several kinds, what they must give, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.rows.config import GROUP, RmsNormFp8Config
from dsv4.ops.quantize import quantize_e4m3
from dsv4.ops.rms_norm_fp8 import RMS_NORM_FP8, rms_norm_rows
from dsv4.testing.kernel_call import OpInputs

EPS = 1e-6
# Elements between the end of a row and the next, in strided cases: every row stays aligned.
PADDING = 24


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        tokens, dim: rows and their elements.
        weight_dtype: as in `RmsNormFp8Config`.
        kind: of the values, a name in `KINDS`.
        wants_norm: whether the normalised rows are written too.
        is_strided: whether rows lie apart, in a wider tensor each.
    """

    tokens: int
    dim: int
    weight_dtype: str | None = "float32"
    kind: str = "normal"
    wants_norm: bool = True
    is_strided: bool = False

    @property
    def config(self) -> RmsNormFp8Config:
        return RmsNormFp8Config(self.dim, EPS, self.weight_dtype)


def normal(tokens: int, dim: int, generator: torch.Generator) -> Tensor:
    """Unit normal values, rows of different magnitude."""
    exponents = torch.randint(-12, 12, (tokens, 1), generator=generator)
    return torch.randn(tokens, dim, generator=generator) * torch.exp2(exponents.float())


def growing(tokens: int, dim: int, generator: torch.Generator) -> Tensor:
    """Every group twice as large as the one before: no two scales are the same."""
    x = torch.randn(tokens, dim, generator=generator)
    exponents = torch.arange(dim // GROUP).repeat_interleave(GROUP) % 60
    return x * torch.exp2(exponents.float() - 30)


def integers(tokens: int, dim: int, generator: torch.Generator) -> Tensor:
    """Small integers: sums of squares are exact, in whatever order they are added."""
    return torch.randint(-3, 4, (tokens, dim), generator=generator).float()


def special(tokens: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows that are not ordinary, in turns: NaN, one NaN, one Inf, zeros, squares that overflow,
    subnormals, and an ordinary one."""
    x = torch.randn(tokens, dim, generator=generator)
    x[0::7] = torch.nan
    x[1::7, dim // 2] = torch.nan
    x[2::7, dim - 1] = torch.inf
    x[3::7] = 0
    x[4::7, : dim // 2] *= 2.0**100
    x[5::7] *= 2.0**-128
    return x


KINDS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": normal,
    "growing": growing,
    "integers": integers,
    "special": special,
}


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case: x [T, d] bf16, weight [d] or [0]."""

    op = RMS_NORM_FP8

    case: Case
    x: Tensor
    weight: Tensor

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        """Inputs of a case; its weight has zeros and both signs."""
        generator = torch.Generator().manual_seed(seed)
        values = KINDS[case.kind](case.tokens, case.dim, generator).bfloat16()
        width = case.dim + PADDING * case.is_strided
        x = torch.empty(case.tokens, width, dtype=torch.bfloat16, device=device)[:, : case.dim]
        x.copy_(values)
        size = 0 if case.weight_dtype is None else case.dim
        weight = torch.randn(size, generator=generator)
        weight[::50] = 0
        return cls(case, x, weight.to(device, getattr(torch, case.weight_dtype or "float32")))

    @property
    def optional_weight(self) -> Tensor | None:
        return None if self.case.weight_dtype is None else self.weight

    @property
    def config(self) -> RmsNormFp8Config:
        return self.case.config

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {"x": self.x, "weight": self.weight}

    @property
    def wanted(self) -> tuple[str, ...]:
        return ("norm_out",) if self.case.wants_norm else ()

    @property
    def padding(self) -> int:
        return PADDING if self.case.is_strided else 0

    def expected(self) -> dict[str, Tensor]:
        """What the torch implementation gives, by the operator's names."""
        norm = rms_norm_rows(self.x, self.optional_weight, EPS)
        codes, scales = quantize_e4m3(norm, GROUP)
        found = {"out": codes, "scale_out": scales}
        return {**found, "norm_out": norm} if self.case.wants_norm else found


def assert_same_codes(name: str, actual: Tensor, expected: Tensor) -> None:
    """Equal bits; a NaN equals any NaN, whose sign and payload no operation promises."""
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    integers = torch.int16 if actual.element_size() == 2 else torch.uint8
    both = actual.float().isnan() & expected.to(actual.device).float().isnan()
    wrong = (actual.view(integers) != expected.to(actual.device).view(integers)) & ~both
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ, the first at {where}: "
            f"{actual[where].float().item()}, expected {expected[where].float().item()}"
        )
