"""`index_topk` on a GPU: time beside the byte floor, and beside the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from dsv4.bench.machine import Machine
from dsv4.bench.rows import Result, each_shape, time_cells
from dsv4.bench.timing import graph_microseconds
from dsv4.kernels.kit.index_entry import MODEL_FORMAT, IndexEntry
from dsv4.ops.index_topk import INDEX_TOPK, index_topk
from dsv4.testing.index_topk import Case, Inputs, assert_choice, run_op

TOKENS = (1, 4, 16, 64)
ENTRIES = (4096, 32768, 131072)
TOPK = 512
# Bytes of keys that the inputs of all replays have together at least.
REPLAY_BYTES, MAX_SETS = 200e6, 256
PLAIN_KEYS = 1 << 19  # keys up to which the torch implementation is timed, too
CHECKED = 4  # tokens
COLUMNS = ("T", "entries", "keys", "us", "floor us", "of floor", "torch us")


@dataclass(frozen=True)
class Shape:
    """Tokens, each of a request of its own, the entries that each sees, and the format of keys."""

    tokens: int
    entries: int
    key_format: str = MODEL_FORMAT

    @property
    def bytes(self) -> int:
        """Keys are read."""
        return self.tokens * self.entries * IndexEntry(128, self.key_format).bytes


def model_shapes() -> list[Shape]:
    """Decode steps of 16k to 512k tokens of context."""
    return [Shape(tokens, entries) for tokens in TOKENS for entries in ENTRIES]


@each_shape
def measure(shape: Shape, machine: Machine) -> Result:
    """Measure a shape; nothing is timed that is not right.

    Raises:
        AssertionError: the kernel's results are not the oracle's.
    """
    # Pages as the cache lays them out.
    options = {"gives_slots": True, "gap": 0, "key_format": shape.key_format}
    case = Case((shape.entries,) * shape.tokens, TOPK, **options)
    first = Inputs.make(case, 0, "cuda")
    assert_choice(first, run_op(first), range(min(shape.tokens, CHECKED)))
    sets = min(max(2, round(REPLAY_BYTES / shape.bytes)), MAX_SETS)
    if shape.bytes > REPLAY_BYTES:
        sets = 1
    inputs = [first, *(first.clone() for _ in range(sets - 1))]
    plain_time = 0.0
    if shape.tokens * shape.entries <= PLAIN_KEYS:
        plain_time = graph_microseconds([partial(plain, one) for one in inputs[:2]])
    return Result(
        shape,
        graph_microseconds([partial(_run, one) for one in inputs]),
        floor=machine.floor(shape.bytes),
        torch=plain_time,
    )


def _run(inputs: Inputs) -> None:
    """The operator, with scores of its own."""
    case = inputs.case
    index_topk(
        **inputs.tensors,
        topk=case.topk,
        weight_scale=case.config.weight_scale,
        gives_slots=case.gives_slots,
    )


def plain(inputs: Inputs) -> None:
    """The same by the torch implementation."""
    arguments = inputs.arguments
    scores = arguments.pop("scores")
    shape = (len(inputs.case.lens), inputs.case.topk)
    indices = torch.empty(shape, dtype=torch.int32, device="cuda")
    INDEX_TOPK.torch(inputs.config, *arguments.values(), indices, scores)


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return asdict(result)


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    return [
        f"{row['shape']['tokens']}",
        f"{row['shape']['entries']}",
        # Records are older than FP4 keys.
        row["shape"].get("key_format", "fp8"),
        *time_cells(row, is_bold),
        f"{row['torch']:.0f}" if row["torch"] else "-",
    ]
