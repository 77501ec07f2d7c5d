"""Decode steps of an engine on a GPU: tokens per second, and the time between two steps."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dsv4.bench.kernel_times import kernel_times
from dsv4.bench.machine import Machine
from dsv4.bench.random_model import MODELS, RandomModel, fitting_model, truncated
from dsv4.bench.report import layers_cell
from dsv4.engine.engine import Engine
from dsv4.engine.memory_plan import plan_memory
from dsv4.engine.sampling_params import SamplingParams

BATCHES = (1, 16, 64)
PROMPT = 256
WARM_UP, STEPS, PROFILED_STEPS = 10, 60, 20
SPARE = 40  # tokens a request may still generate: none ends while it is timed
COLUMNS = (
    *("model", "layers", "B", "prompt"),
    *("step ms", "tokens/s", "between steps us", "longest us"),
)


@dataclass(frozen=True)
class Shape:
    """Requests that an engine decodes greedily.

    Attributes:
        model: of `MODELS`; layers: its first so many, None: all.
        batch: requests; prompt: tokens of each.
    """

    model: str
    layers: int | None
    batch: int
    prompt: int


@dataclass(frozen=True)
class Result:
    """Decode steps as the host runs them.

    Attributes:
        layers: layers of the model that was run; aliased_layers: those with experts of others.
        microseconds: mean of the steps, on the host's clock.
        between: microseconds on the GPU's clock from a step's last kernel to the next one's first,
            median; longest: of those that were seen.
        kernels: name, calls and microseconds of a step's kernels, the slowest first.
    """

    shape: Shape
    layers: int
    aliased_layers: int
    microseconds: float
    between: float
    longest: float
    kernels: list[tuple[str, int, float]]

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.shape.batch / self.microseconds * 1e6


def measure(
    shapes: Sequence[Shape], machine: Machine, is_aliased: bool, trace: Path | None = None
) -> Iterator[Result]:
    """Measure each shape of one model.

    Args:
        is_aliased: let layers share experts where they do not fit.
        trace: also write a timeline of a step of the last shape, for Perfetto.

    Raises:
        ValueError: the model does not fit; the message says how much is missing.
    """
    config = truncated(MODELS[shapes[0].model](), shapes[0].layers, has_drafts=False)
    plans = [plan_memory(config, _context(s), s.batch) for s in shapes]
    made = fitting_model(config, plans, is_aliased)
    for place, shape in enumerate(shapes):
        is_last = place == len(shapes) - 1
        yield _measured(made, shape, trace if is_last else None)


def _context(shape: Shape) -> int:
    return shape.prompt + WARM_UP + STEPS + PROFILED_STEPS + SPARE


def _measured(made: RandomModel, shape: Shape, trace: Path | None) -> Result:
    vocab = made.model.config.vocab_size
    engine = Engine(made.model, shape.batch, _context(shape))
    new = _context(shape) - shape.prompt
    for _ in range(shape.batch):
        prompt = torch.randint(vocab, (shape.prompt,))
        engine.add(prompt, SamplingParams(max_new_tokens=new, stop_tokens=()))
    while engine.stats.decode_tokens < WARM_UP * shape.batch:
        engine.step()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    time = (perf_counter() - begin) / STEPS * 1e6
    gaps = _between_steps(engine)
    return Result(
        shape=shape,
        layers=made.model.config.num_hidden_layers,
        aliased_layers=made.aliased_layers,
        microseconds=time,
        between=statistics.median(gaps),
        longest=max(gaps),
        kernels=kernel_times(engine.step, trace),
    )


def _between_steps(engine: Engine) -> list[float]:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return gaps(json.loads(path.read_text())["traceEvents"])


def gaps(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Microseconds from the last kernel of a graph's replay to the first of the next one's.

    Args:
        events: of a trace; kernels of one replay have one correlation, a number that grows.

    Raises:
        ValueError: there are fewer than two replays.
    """
    replays: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            span = event["ts"], event["ts"] + event["dur"]
            replays.setdefault(event["args"]["correlation"], []).append(span)
    most = max(map(len, replays.values()), default=0)
    # What is launched beside the graphs are single kernels.
    steps = sorted(spans for spans in replays.values() if 2 * len(spans) > most > 1)
    if len(steps) < 2:
        raise ValueError(f"the trace has {len(steps)} replays of a graph, needs two")
    return [
        min(start for start, _ in after) - max(end for _, end in before)
        for before, after in pairwise(steps)
    ]


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "tokens_per_second": result.tokens_per_second}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    shape = row["shape"]
    found = f"{row['microseconds'] / 1e3:.2f}"
    return [
        shape["model"],
        layers_cell(row),
        f"{shape['batch']}",
        f"{shape['prompt']}",
        f"**{found}**" if is_bold else found,
        f"{row['tokens_per_second']:.0f}",
        f"{row['between']:.1f}",
        f"{row['longest']:.1f}",
    ]
