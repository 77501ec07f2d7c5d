"""Parts that benchmarks of operators share: results, their cells, one shape after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from dsv4.bench.machine import Machine


@dataclass(frozen=True)
class Result:
    """Times in microseconds; `torch` is that of the operator's torch implementation, 0 where it was
    not timed."""

    shape: Any
    microseconds: float
    floor: float
    torch: float

    @property
    def gigabytes(self) -> float:
        """GB/s."""
        return self.shape.bytes / self.microseconds / 1e3


def each_shape(one: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """Measure shapes one after the other, each by `one`, in inference mode."""

    @wraps(one)
    def measure(shapes: Sequence[Any], machine: Machine, *more: Any) -> Iterator[Any]:
        for shape in shapes:
            with torch.inference_mode():
                result = one(shape, machine, *more)
            yield result
            # The next shape needs the memory, in blocks of other sizes.
            torch.cuda.empty_cache()

    return measure


def time_cells(row: Mapping[str, Any], is_bold: bool) -> list[str]:
    """Cells of our time, its rate where the row has one, the floor, and how near the time is."""
    time, floor = row["microseconds"], row["floor"]
    rate = row.get("gigabytes_per_second")
    return [
        f"**{time:.2f}**" if is_bold else f"{time:.2f}",
        *([] if rate is None else [f"{rate:.0f}"]),
        f"{floor:.2f}",
        f"{floor / time:.0%}",
    ]
