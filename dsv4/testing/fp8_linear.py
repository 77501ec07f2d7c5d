"""`fp8_linear` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import K_BLOCK, Fp8LinearConfig
from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.ops.quantize import quantize_e4m3
from dsv4.reference import linear as oracle
from dsv4.reference.weights import decode_fp8
from dsv4.testing.kernel_call import OpInputs

# Elements between the end of a row and the next, in strided cases: every row stays aligned.
PADDING = 16
# Rounding of the output, relative to it: half a unit of the last place.
ROUNDING = {"bfloat16": 2**-8, "float32": 2**-24}
# Error of the sum of a k block relative to the sum of its terms' magnitudes. Hopper's FP8
# accumulator cuts terms off 13 bits below the largest one: up to 2.6e-4 was seen on an H200, 2.7e-4
# of normal values by its bits. Errors of blocks add up as what is independent does.
SUM_ERROR = 2**-11
# The same of all sums together, by the norm: 1.2e-4 to 2.2e-4 on an H200.
TRUNCATION = 2.2e-4
MAX_RELATIVE_ERROR = 4e-3  # of a token's y, by the norm
# Features from which a norm says something: one sum alone may cancel to nothing.
MIN_NORM_FEATURES = 64


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        tokens, in_features, out_features: T, K and M.
        x_dtype, scale_dtype, out_dtype: as in `Fp8LinearConfig`.
        has_special_rows: whether some tokens are not ordinary: see `make_x`.
        is_strided: whether rows lie apart, in a wider tensor each.
    """

    tokens: int
    in_features: int
    out_features: int
    x_dtype: str = "bfloat16"
    scale_dtype: str = "float8_e8m0fnu"
    out_dtype: str = "bfloat16"
    has_special_rows: bool = False
    is_strided: bool = False

    @property
    def config(self) -> Fp8LinearConfig:
        return Fp8LinearConfig(
            self.in_features, self.out_features, self.x_dtype, self.scale_dtype, self.out_dtype
        )


def make_x(case: Case, generator: torch.Generator) -> Tensor:
    """[T, K] bf16 normal values, rows and groups of different magnitude.

    Special rows, every fifth each: NaN, one Inf, zeros, one large value.
    """
    options = {"generator": generator, "device": generator.device}
    x = torch.randn(case.tokens, case.in_features, **options)
    exponents = torch.randint(-6, 6, (case.tokens, case.in_features // K_BLOCK), **options)
    exponents += torch.randint(-8, 8, (case.tokens, 1), **options)
    x *= torch.exp2(exponents.float()).repeat_interleave(K_BLOCK, 1)
    if case.has_special_rows:
        x[0::5] = torch.nan
        x[1::5, 1] = torch.inf
        x[2::5] = 0
        x[3::5, -1] = 2.0**60
    return x.bfloat16()


def make_scale(case: Case, generator: torch.Generator) -> Tensor:
    """Scales of the weight's blocks, powers of two or arbitrary."""
    shape = (-(-case.out_features // K_BLOCK), case.in_features // K_BLOCK)
    options = {"generator": generator, "device": generator.device}
    if case.scale_dtype == "float32":
        return torch.rand(shape, **options) * 1e-2 + 1e-3
    exponents = torch.randint(112, 124, shape, dtype=torch.uint8, **options)
    return exponents.view(torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case: x and x_scale as the operator takes them, and x in bf16.

    Attributes:
        rows: that decide how the kernel is compiled, where they are not the case's.
        has_scratch: whether launches have room to quantise many tokens into.
    """

    op = FP8_LINEAR

    case: Case
    x: Tensor
    weight: Tensor
    scale: Tensor
    x_scale: Tensor
    wide: Tensor
    rows: int | None = None
    has_scratch: bool = True

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        wide = make_x(case, generator)
        shape = (case.out_features, case.in_features)
        weight = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
        scale = make_scale(case, generator)
        x, x_scale = wide, scale.new_empty((0, case.in_features // K_BLOCK))
        if case.x_dtype == "float8_e4m3fn":
            x, x_scale = quantize_e4m3(wide, K_BLOCK)
        tensors = [x, weight, scale, x_scale.to(torch.float8_e8m0fnu), wide]
        if case.is_strided:
            tensors[:2] = [spread_rows(t) for t in tensors[:2]]
        return cls(case, *tensors)

    def first(self, tokens: int) -> Inputs:
        """The same with the first tokens alone."""
        part = replace(self.case, tokens=tokens)
        rows = {name: getattr(self, name)[:tokens] for name in ("x", "x_scale", "wide")}
        return replace(self, case=part, **rows)

    @property
    def config(self) -> Fp8LinearConfig:
        config = self.case.config
        return config if self.rows is None else replace(config, out_features=self.rows)

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("x", "weight", "scale", "x_scale")}

    @property
    def wanted(self) -> tuple[str, ...]:
        return ("codes", "code_scales") if self.has_scratch else ()

    @property
    def padding(self) -> int:
        return PADDING if self.case.is_strided else 0

    @property
    def optional_x_scale(self) -> Tensor | None:
        return self.x_scale if self.case.x_dtype == "float8_e4m3fn" else None

    def expected(self) -> Tensor:
        """y [T, M] in fp64."""
        return oracle.fp8_linear(self.x, self.weight, self.scale, self.optional_x_scale)

    def magnitude(self) -> Tensor:
        """Of each element, `block_magnitudes` of its terms."""
        codes, scales = quantize_e4m3(self.wide, K_BLOCK)
        x = codes.double() * scales.double().repeat_interleave(K_BLOCK, 1)
        return block_magnitudes(x, decode_fp8(self.weight, self.scale, (K_BLOCK, K_BLOCK)).double())


def block_magnitudes(x: Tensor, weight: Tensor) -> Tensor:
    """Sums of the magnitudes of a k block's terms, of all blocks the root of the sum of squares.

    Args:
        x, weight: [..., n, K] and [..., m, K] fp64.

    Returns:
        [..., n, m].
    """
    total = x.new_zeros(())
    for begin in range(0, x.shape[-1], K_BLOCK):
        part = slice(begin, begin + K_BLOCK)
        total = total + (x[..., part].abs() @ weight[..., part].abs().mT).square()
    return total.sqrt()


def spread_rows(rows: Tensor) -> Tensor:
    """The same rows, each in a wider one."""
    frame = rows.new_empty((rows.shape[0], rows.shape[1] + PADDING))
    frame[:, : rows.shape[1]].copy_(rows)
    return frame[:, : rows.shape[1]]


def assert_linear_close(actual: Tensor, inputs: Inputs) -> None:
    """Fail where y is further from the oracle than rounding and the accumulator allow."""
    expected = inputs.expected()
    allowed = expected.abs() * ROUNDING[inputs.case.out_dtype] + inputs.magnitude() * SUM_ERROR
    assert_within(actual, expected, allowed, "y")


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor, name: str) -> None:
    """Fail where an output [T, M] is further from what is expected than allowed, element by
    element and by the norm of a token, or not finite elsewhere."""
    actual = actual.to(expected.device).double()
    lost = actual.isfinite() != expected.isfinite()
    assert not lost.any(), (
        f"{name}: {int(lost.sum())} elements are not finite where it is, or reverse"
    )
    finite = expected.isfinite()
    error = torch.where(finite, actual - expected, 0.0).abs()
    worst = torch.where(finite, error - allowed * (1 + 1e-6), -1.0)
    where = divmod(int(worst.argmax()), worst.shape[1])
    assert worst.max() <= 0, (
        f"{name}{list(where)}: got {actual[where]:.6g}, needs {expected[where]:.6g} "
        f"within {allowed[where]:.2g}"
    )
    if expected.shape[1] < MIN_NORM_FEATURES:
        return
    norm = torch.where(finite, expected, 0.0).norm(dim=1).clamp(min=1e-30)
    relative = float((error.norm(dim=1) / norm).max())
    assert relative <= MAX_RELATIVE_ERROR, f"{name}: relative error {relative:.2e} of a token"
