"""`compress` on a GPU: time beside the byte floor, and beside the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from dsv4.bench.machine import Machine
from dsv4.bench.rows import Result, each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.ops import compress
from dsv4.ops.compress import COMPRESS
from dsv4.testing.compress import EPS, Case, Inputs, assert_step

KINDS: dict[str, dict[str, Any]] = {
    "CSA": {"ratio": 4, "overlap": True},
    "HCA": {"ratio": 128, "overlap": False},
    "indexer": {"ratio": 4, "overlap": True, "dim": 128, "is_index": True},
}
REQUESTS = (1, 16, 64)
FIRST = 511  # position of the new token: the last of its block, for every kind
SETS = 64  # inputs that replays go through
COLUMNS = ("B", "kind", "us", "floor us", "of floor", "torch us")


@dataclass(frozen=True)
class Shape:
    """Requests with one new token each, with which a block ends."""

    requests: int
    kind: str

    @property
    def case(self) -> Case:
        count = self.requests
        return Case((FIRST,) * count, (1,) * count, page=32, **KINDS[self.kind])

    @property
    def bytes(self) -> int:
        """A mean's tokens are read, value and score; one is written."""
        config = self.case.config
        return self.requests * 4 * 2 * (config.terms * config.dim + 2 * config.width)


def model_shapes() -> list[Shape]:
    """Compressors of the released models, all requests at a block's end at once."""
    return [Shape(count, kind) for kind in KINDS for count in REQUESTS]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        AssertionError: the kernel's results are not the torch implementation's.
    """
    inputs = Inputs.make(shape.case, 0, "cuda")
    sets = [inputs.arguments for _ in range(SETS)]
    _run(inputs, sets[0])
    assert_step(inputs, sets[0])
    return Result(
        shape,
        graph_microseconds([partial(_run, inputs, one) for one in sets]),
        floor=machine.floor(shape.bytes),
        torch=graph_microseconds([partial(_plain, inputs, one) for one in sets[:2]]),
    )


def _run(inputs: Inputs, arguments: Mapping[str, torch.Tensor]) -> None:
    """The operator."""
    compress(**arguments, eps=EPS, is_index=inputs.case.is_index)


def _plain(inputs: Inputs, arguments: Mapping[str, torch.Tensor]) -> None:
    """The same by the torch implementation."""
    COMPRESS.torch(inputs.config, *arguments.values())


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return asdict(result)


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    return [
        f"{row['shape']['requests']}",
        row["shape"]["kind"],
        *time_cells(row, is_bold),
        f"{row['torch']:.1f}",
    ]
