"""`merged_linear` on a GPU: time beside the floor, and beside the same weights one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench import fp8_linear
from dsv4.bench.machine import Machine
from dsv4.bench.rows import each_shape
from dsv4.bench.timing import graph_microseconds
from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.ops.merged_linear import MODEL_INPUTS
from dsv4.ops.quantize import quantize_e4m3

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
COLUMNS = ("input", "T", "us", "codes given us", "GB/s", "floor us", "of floor", "one by one us")


@dataclass(frozen=True)
class Shape:
    """An input of `MODEL_INPUTS`, and tokens."""

    label: str
    tokens: int

    @property
    def config(self) -> MergedLinearConfig:
        return MergedLinearConfig(*MODEL_INPUTS[self.label])

    @property
    def bytes(self) -> int:
        """Weights are read, x in bf16, outputs are written; scales are too few to count."""
        total = 2 * self.tokens * self.config.in_features
        for weight in self.config.parsed:
            total += weight.rows * self.config.in_features * weight.kind.value
            total += self.tokens * weight.rows * (4 if weight.out_dtype == "float32" else 2)
        return total

    @property
    def half_rate_flops(self) -> float:
        """FLOPs in bf16's: FP8 products take half of the time."""
        rows = sum(weight.rows * weight.kind.value for weight in self.config.parsed)
        return float(self.tokens * rows * self.config.in_features)


@dataclass(frozen=True)
class Result:
    """Times in microseconds: of the call; with codes of x given; of a call for each weight."""

    shape: Shape
    microseconds: float
    with_codes: float
    one_by_one: float
    floor: float

    @property
    def gigabytes(self) -> float:
        """GB/s."""
        return self.shape.bytes / self.microseconds / 1e3


def model_shapes() -> list[Shape]:
    """Every input of the models' layers, from one token to 4,096."""
    return [Shape(label, tokens) for label in MODEL_INPUTS for tokens in TOKENS]


@dataclass(frozen=True)
class Inputs:
    """x, also as codes with scales, weights, scales of the FP8 ones, and outputs."""

    x: Tensor
    codes: dict[str, Tensor]
    weights: list[Tensor]
    scales: list[Tensor]
    outs: list[Tensor]

    @classmethod
    def make(cls, shape: Shape, device: str) -> Inputs:
        config = shape.config
        weights, scales, outs = [], [], []
        x = torch.randn(shape.tokens, config.in_features, device=device).bfloat16()
        for weight in config.parsed:
            if weight.kind is Kind.FP8:
                size = fp8_linear.Shape(1, weight.rows, config.in_features)
                _, matrix, scale = fp8_linear.make_inputs(size, device)
                weights.append(matrix)
                scales.append(scale)
            else:
                size = (weight.rows, config.in_features)
                weights.append(torch.randn(size, device=device).bfloat16())
            dtype = getattr(torch, weight.out_dtype)
            outs.append(torch.empty(shape.tokens, weight.rows, dtype=dtype, device=device))
        values, exponents = quantize_e4m3(x, fp8_linear.K_BLOCK)
        codes = {"x_codes": values, "x_scale": exponents.to(torch.float8_e8m0fnu)}
        return cls(x, codes, weights, scales, outs)

    def merged(self, **codes: Tensor) -> list[Tensor]:
        return ops.merged_linear(self.x, self.weights, self.scales, outs=self.outs, **codes)

    def one_by_one(self) -> list[Tensor]:
        """`fp8_linear` of each FP8 weight, cuBLAS in bf16 of the others."""
        count = len(self.scales)
        return [
            *(
                ops.fp8_linear(self.x, weight, scale, out=out)
                for weight, scale, out in zip(self.weights, self.scales, self.outs)
            ),
            *(torch.mm(self.x, weight.mT) for weight in self.weights[count:]),
        ]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        RuntimeError: an output differs from that of its weight by itself.
    """
    sets = max(2, round(fp8_linear.REPLAY_BYTES / shape.bytes))
    inputs = [Inputs.make(shape, "cuda") for _ in range(sets)]
    check(shape, [y.clone() for y in inputs[0].merged()], inputs[0].one_by_one())
    return Result(
        shape,
        graph_microseconds([given.merged for given in inputs]),
        with_codes=graph_microseconds([partial(given.merged, **given.codes) for given in inputs]),
        one_by_one=graph_microseconds([given.one_by_one for given in inputs]),
        floor=machine.floor(shape.bytes, shape.half_rate_flops),
    )


def check(shape: Shape, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare each output with that of its weight by itself, which is rounded to bf16."""
    for i, (y, alone) in enumerate(zip(actual, expected, strict=True)):
        error = float((y.float() - alone.float()).norm() / alone.float().norm())
        if not error <= fp8_linear.MAX_RELATIVE_ERROR:
            raise RuntimeError(f"{shape}: relative error {error:.1e} of output {i}")


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "gigabytes_per_second": result.gigabytes}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape = row["microseconds"], row["shape"]
    return [
        shape["label"],
        f"{shape['tokens']}",
        f"**{time:.2f}**" if is_bold else f"{time:.2f}",
        f"{row['with_codes']:.2f}",
        f"{row['gigabytes_per_second']:.0f}",
        f"{row['floor']:.2f}",
        f"{row['floor'] / time:.0%}",
        f"{row['one_by_one']:.1f}",
    ]
