"""The sampler on a GPU: time beside the byte floor, and beside the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.bench.machine import Machine
from dsv4.bench.rows import Result, each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.ops.sample_tokens import VOCAB_SIZE, sample_tokens
from dsv4.ops.sampling_torch import tokens_of

ROWS = (1, 4, 16, 64, 256)
LOGIT_BYTES = 4
# Bytes of logits that the inputs of all replays have together at least, and how many sets at most.
REPLAY_BYTES, MAX_SETS = 200e6, 80
SPREAD = 3.0  # standard deviation of logits: some hundred tokens have half of the probability
OPTIONS = {
    "temperature": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 50},
    "min-p": {"min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 200, "min_p": 0.001},
}
COLUMNS = ("rows", "options", "us", "floor us", "of floor", "torch us")


@dataclass(frozen=True)
class Shape:
    """Rows of logits of the released models, and how they are sampled."""

    rows: int
    options: str = "temperature"

    @property
    def bytes(self) -> int:
        """Logits are read."""
        return self.rows * VOCAB_SIZE * LOGIT_BYTES


def model_shapes() -> list[Shape]:
    """Decode steps, by options."""
    return [Shape(rows, options) for options in OPTIONS for rows in ROWS]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        RuntimeError: the kernel's tokens are not those of the torch implementation.
    """
    rows = shape.rows
    sets = min(max(2, round(REPLAY_BYTES / shape.bytes)), MAX_SETS)
    logits = [torch.randn(rows, 1, VOCAB_SIZE, device="cuda") * SPREAD for _ in range(sets)]
    given = _given(rows, OPTIONS[shape.options])
    if not torch.equal(sample_tokens(logits[0], **given), tokens_of(logits[0], **given)):
        raise RuntimeError(f"{rows} rows, {shape.options}: other tokens than in torch")
    return Result(
        shape,
        graph_microseconds([partial(sample_tokens, each, **given) for each in logits]),
        floor=machine.floor(shape.bytes),
        torch=graph_microseconds([partial(tokens_of, each, **given) for each in logits[:2]]),
    )


def _given(rows: int, options: Mapping[str, float]) -> dict[str, Tensor]:
    """All arguments but the logits."""
    given = {
        "positions": torch.arange(rows, device="cuda")[:, None],
        "temperature": torch.full((rows,), 0.9, device="cuda"),
        "seed": torch.arange(rows, device="cuda"),
    }
    return given | {
        name: torch.full((rows,), value, device="cuda") for name, value in options.items()
    }


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return asdict(result)


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    return [
        f"{row['shape']['rows']}",
        row["shape"]["options"],
        *time_cells(row, is_bold),
        f"{row['torch']:.0f}",
    ]
