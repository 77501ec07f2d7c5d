"""`mhc_seam` on a GPU: time beside the byte floor, and beside the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from dsv4.bench.machine import Machine
from dsv4.bench.rows import Result, each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.ops.mhc_seam import MHC_SEAM
from dsv4.testing.mhc_seam import Case, Inputs, assert_seam_close, run_op

TOKENS = (1, 4, 16, 64, 256, 1024)
DIMS = (4096, 7168)  # hidden sizes of Flash and Pro
STREAMS, ROWS = 4, 24
# Bytes that the inputs of all replays have together at least: fn of every replay is another one.
REPLAY_BYTES = 200e6
COLUMNS = ("T", "D", "us", "floor us", "of floor", "torch us")


@dataclass(frozen=True)
class Shape:
    """Tokens and elements of a stream."""

    tokens: int
    dim: int

    @property
    def bytes(self) -> int:
        """fn, streams and y are read, streams, x and its codes written."""
        row = 2 * (2 * STREAMS + 2) + 1
        return ROWS * STREAMS * self.dim * 4 + self.tokens * self.dim * row


def model_shapes() -> list[Shape]:
    """Seams of Flash and Pro, from one token to a prefill."""
    return [Shape(tokens, dim) for dim in DIMS for tokens in TOKENS]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        AssertionError: the kernel's results are not the oracle's.
    """
    case = Case(shape.tokens, shape.dim)
    first = Inputs.make(case, 0, "cuda")
    assert_seam_close(first, run_op(first))
    sets = max(2, round(REPLAY_BYTES / shape.bytes))
    inputs = [first.clone() for _ in range(sets)]
    return Result(
        shape,
        graph_microseconds([partial(run_op, one) for one in inputs]),
        floor=machine.floor(shape.bytes),
        torch=graph_microseconds([partial(plain, one) for one in inputs[:8]]),
    )


def plain(inputs: Inputs) -> None:
    """The same by the torch implementation."""
    tensors = inputs.tensors
    streams = tensors["streams"]
    tokens, _, dim = streams.shape
    outputs = [
        streams.new_empty((tokens, dim)),
        *(tensors[name] for name in ("y", "post", "comb", "rows", "ids", "counts")),
        torch.empty_like(streams),
        torch.empty_like(tensors["post"]),
        torch.empty_like(tensors["comb"]),
        torch.empty((tokens, dim), dtype=torch.float8_e4m3fn, device="cuda"),
        torch.empty((tokens, dim // 128), dtype=torch.float8_e8m0fnu, device="cuda"),
    ]
    given = (tensors[name] for name in ("streams", "fn", "base", "scale", "norm_weight"))
    MHC_SEAM.torch(inputs.config, *given, *outputs)


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return asdict(result)


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    return [
        f"{row['shape']['tokens']}",
        f"{row['shape']['dim']}",
        *time_cells(row, is_bold),
        f"{row['torch']:.1f}",
    ]
