"""`latent_rows` on a GPU: its time beside that of the separate launches, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from dsv4.bench.machine import Machine
from dsv4.bench.rows import each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.ops import compress, kv_insert, latent_rows, rms_norm_fp8
from dsv4.testing.latent_rows import (
    EPS,
    KINDS,
    OWN,
    QUERY,
    REQUESTS,
    WINDOW,
    Case,
    Inputs,
    assert_tasks,
)

TOKENS = (1, 16, 64, 256)
LAST, MIDDLE = 511, 513  # positions of the new token: of all blocks the last, of none
SETS_BYTES = 2**28  # of inputs that replays go through: more than L2 holds
MOST_SETS = 64
COLUMNS = ("T", "layer", "blocks end", "us", "floor us", "of floor", "separate us", "launches")


@dataclass(frozen=True)
class Shape:
    """Requests with one new token each.

    Attributes:
        kind: of the layer.
        ends: whether blocks end with these tokens, as every fourth or every 128th step.
    """

    requests: int
    kind: str
    ends: bool = True

    @property
    def case(self) -> Case:
        count, start = self.requests, LAST if self.ends else MIDDLE
        return Case((start,) * count, (1,) * count, page=32, **KINDS[self.kind])

    @property
    def bytes(self) -> int:
        """A query latent is read and written twice, a key once each; what a mean needs is read, and
        a token written to each state."""
        case = self.case
        config = case.config
        count = 2 * case.dim + config.insertion.row + 5 * case.query_dim + case.query_dim // 128
        for part in (config.compressor, config.indexer):
            if part is not None:
                count += 4 * 2 * (2 * part.width + self.ends * part.terms * part.dim)
        return self.requests * count


@dataclass(frozen=True)
class Result:
    """Times in microseconds; `separate` is that of so many launches, one after the other."""

    shape: Shape
    microseconds: float
    floor: float
    separate: float
    launches: int


def model_shapes() -> list[Shape]:
    """Layers of Flash, all requests at a block's end at once, and none."""
    ends = {kind: (True, False) if KINDS[kind].get("ratio", 4) else (False,) for kind in KINDS}
    return [Shape(n, kind, end) for kind in KINDS for end in ends[kind] for n in TOKENS]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        AssertionError: the kernel's results are not the torch implementations'.
    """
    inputs = Inputs.make(shape.case, 0, "cuda")
    first = inputs.arguments
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    count = max(2, min(MOST_SETS, SETS_BYTES // size))
    sets = [first, *(inputs.arguments for _ in range(count - 1))]
    found = latent_rows(**inputs.options(first))
    assert_tasks(inputs, {**first, **dict(zip(QUERY[2:], found or ()))})
    return Result(
        shape,
        graph_microseconds([partial(latent_rows, **inputs.options(one)) for one in sets]),
        floor=machine.floor(shape.bytes),
        separate=graph_microseconds([partial(_separate, inputs, one) for one in sets]),
        launches=1 + (inputs.query is not None) + len(inputs.compressions()),
    )


def _separate(inputs: Inputs, given: Mapping[str, torch.Tensor]) -> None:
    """The same by an operator for each task."""
    rms_norm_fp8(given["query"], given["query_weight"], eps=EPS, return_norm=True)
    kv_insert(*(given[name] for name in WINDOW), eps=EPS)
    requests = zip(("state_rows", "starts", "lens", "slots"), (given[name] for name in REQUESTS))
    shared = {**dict(requests), "rope": given["rope"]} if inputs.entries is not None else {}
    for part, names in inputs.compressions():
        own = dict(zip(OWN, (given[name] for name in names), strict=True))
        compress(**own, **shared, eps=EPS, is_index=part.case.is_index)


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return asdict(result)


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    shape = row["shape"]
    return [
        f"{shape['requests']}",
        shape["kind"],
        "yes" if shape["ends"] else "no",
        *time_cells(row, is_bold),
        f"{row['separate']:.2f}",
        f"{row['launches']}",
    ]
