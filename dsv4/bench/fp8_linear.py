"""`fp8_linear` on a GPU: time beside the floor, and beside the torch implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench.machine import Machine
from dsv4.bench.rows import Result, each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.ops.fp8_linear import FP8_LINEAR, MODEL_LAYERS

K_BLOCK = 128
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
# Bytes that the weights of one replay have together at least: several times L2.
REPLAY_BYTES = 250e6
MAX_RELATIVE_ERROR = 4e-3  # of y, against fp32 products of the decoded weight
COLUMNS = ("T", "M", "K", "us", "GB/s", "floor us", "of floor", "torch us")


@dataclass(frozen=True)
class Shape:
    """Tokens, output features and input features."""

    tokens: int
    rows: int
    width: int

    @property
    def bytes(self) -> int:
        """The weight, its scales and bf16 activations are read, y is written in bf16."""
        scales = -(-self.rows // K_BLOCK) * self.width // K_BLOCK
        return self.rows * self.width + scales + 2 * self.tokens * (self.width + self.rows)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.rows * self.width


def model_shapes() -> list[Shape]:
    """FP8 linears of Flash and Pro, each size once, from one token to 4,096."""
    sizes = dict.fromkeys(MODEL_LAYERS.values())
    return [Shape(tokens, *size) for size in sizes for tokens in TOKENS]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape, the quantisation of its input included; nothing is timed that is not
    right.

    Raises:
        RuntimeError: the kernel is further from the torch implementation than its rounding allows.
    """
    sets = max(2, round(REPLAY_BYTES / shape.bytes))
    inputs = [make_inputs(shape, "cuda") for _ in range(sets)]
    y = ops.fp8_linear(*inputs[0])
    check(shape, y, plain(*inputs[0], torch.float32))
    calls = [partial(ops.fp8_linear, *tensors, out=torch.empty_like(y)) for tensors in inputs]
    return Result(
        shape,
        graph_microseconds(calls),
        # The rate is that of bf16, half of FP8's.
        floor=machine.floor(shape.bytes, shape.flops / 2),
        torch=graph_microseconds([partial(plain, *tensors) for tensors in inputs[:2]]),
    )


def make_inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and scale."""
    x = torch.randn(shape.tokens, shape.width, device=device).bfloat16()
    weight = torch.randn(shape.rows, shape.width, device=device).to(torch.float8_e4m3fn)
    blocks = (-(-shape.rows // K_BLOCK), shape.width // K_BLOCK)
    scale = torch.randint(115, 122, blocks, device=device, dtype=torch.uint8)
    return x, weight, scale.view(torch.float8_e8m0fnu)


def plain(
    x: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """y by the torch implementation."""
    name = str(out_dtype).removeprefix("torch.")
    config = FP8_LINEAR.config(x.shape[1], weight.shape[0], out_dtype=name)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    FP8_LINEAR.torch(config, x, weight, scale, scale[:0], out, None, None)
    return out


def check(shape: Shape, actual: Tensor, expected: Tensor) -> None:
    """Compare y with products in fp32."""
    error = float((actual.float() - expected).norm() / expected.norm())
    if not error <= MAX_RELATIVE_ERROR:
        raise RuntimeError(f"{shape}: relative error {error:.1e}, at most {MAX_RELATIVE_ERROR}")


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "gigabytes_per_second": result.gigabytes}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    shape = row["shape"]
    return [
        f"{shape['tokens']}",
        f"{shape['rows']}",
        f"{shape['width']}",
        *time_cells(row, is_bold),
        f"{row['torch']:.1f}",
    ]
