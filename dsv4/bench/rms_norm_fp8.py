"""`rms_norm_fp8` on a GPU: time beside the byte floor, and beside the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench.machine import Machine
from dsv4.bench.rows import Result, each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.ops.quantize import quantize_e4m3
from dsv4.ops.rms_norm_fp8 import MODEL_EPS, rms_norm_rows

GROUP = 128
TOKENS = (1, 16, 64, 1024, 8192)
DIMS = (4096, 7168)  # hidden sizes of Flash and Pro
# Bytes that the inputs and outputs of one replay have together at least, and how many sets at most.
REPLAY_BYTES = 400e6
MOST_SETS = 20
COLUMNS = ("T", "d", "us", "GB/s", "floor us", "of floor", "torch us")


@dataclass(frozen=True)
class Shape:
    """Rows and their elements."""

    tokens: int
    dim: int

    @property
    def bytes(self) -> int:
        """x and the weight are read, codes and scales written."""
        return self.tokens * (3 * self.dim + self.dim // GROUP) + 4 * self.dim


def model_shapes() -> list[Shape]:
    """Hidden states of Flash and Pro, from one token to a prefill."""
    return [Shape(tokens, dim) for dim in DIMS for tokens in TOKENS]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        RuntimeError: the kernel's bits are not those of the torch implementation.
    """
    sets = max(2, min(MOST_SETS, round(REPLAY_BYTES / shape.bytes)))
    weight = torch.randn(shape.dim, device="cuda")
    size = (shape.tokens, shape.dim)
    rows = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    outputs = [ops.rms_norm_fp8(x, weight, eps=MODEL_EPS) for x in rows]
    check(shape, outputs[0], plain(rows[0], weight))

    def ours(x: Tensor, out: Tensor, scale_out: Tensor) -> None:
        ops.rms_norm_fp8(x, weight, eps=MODEL_EPS, out=out, scale_out=scale_out)

    calls = [partial(ours, x, *out) for x, out in zip(rows, outputs, strict=True)]
    return Result(
        shape,
        graph_microseconds(calls),
        floor=machine.floor(shape.bytes),
        torch=graph_microseconds([partial(plain, x, weight) for x in rows]),
    )


def plain(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales by the torch implementation."""
    return quantize_e4m3(rms_norm_rows(x, weight, MODEL_EPS), GROUP)


def check(shape: Shape, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare codes and scales bit for bit."""
    for name, got, wanted in zip(("codes", "scales"), actual, expected, strict=True):
        wrong = int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        if wrong:
            raise RuntimeError(f"{shape}: {wrong} of {got.numel()} {name} are not torch's")


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "gigabytes_per_second": result.gigabytes}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    return [
        f"{row['shape']['tokens']}",
        f"{row['shape']['dim']}",
        *time_cells(row, is_bold),
        f"{row['torch']:.1f}",
    ]
