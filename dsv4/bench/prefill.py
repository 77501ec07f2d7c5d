"""Prefill of a prompt on a GPU, in chunks, as an engine runs it: time, floor, kernels."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4.bench.kernel_times import kernel_times
from dsv4.bench.machine import Machine
from dsv4.bench.random_model import MODELS, RandomModel, fitting_model, random_cache, truncated
from dsv4.bench.report import layers_cell
from dsv4.bench.step_floor import Load, StepFloor
from dsv4.bench.timing import elapsed_microseconds
from dsv4.cache.manager import CacheManager
from dsv4.engine.forward import prefill
from dsv4.engine.inputs import known_inputs
from dsv4.engine.memory_plan import plan_memory
from dsv4.engine.sampler import GREEDY

PROMPT, CHUNKS = 8192, (2048, 4096, 8192)
WARM_UP, ROUNDS = 1, 5
COLUMNS = (
    *("model", "layers", "prompt", "chunk"),
    *("prompt ms", "floor ms", "of floor", "tokens/s"),
)


@dataclass(frozen=True)
class Shape:
    """A prompt.

    Attributes:
        model: of `MODELS`; layers: its first so many, None: all.
        prompt: tokens; chunk: tokens of a forward, of which the last may have fewer.
    """

    model: str
    layers: int | None
    prompt: int
    chunk: int


@dataclass(frozen=True)
class Result:
    """Median of whole prompts, in microseconds, launched one by one by the host.

    Attributes:
        layers: layers of the model that was run; aliased_layers: those with experts of others.
        kernels: name, calls and microseconds of the prompt's kernels, the slowest first.
    """

    shape: Shape
    layers: int
    aliased_layers: int
    microseconds: float
    floor: float
    kernels: list[tuple[str, int, float]]

    @property
    def tokens_per_second(self) -> float:
        """Of the prompt."""
        return self.shape.prompt / self.microseconds * 1e6


def measure(
    shapes: Sequence[Shape], machine: Machine, is_aliased: bool, trace: Path | None = None
) -> Iterator[Result]:
    """Measure each shape of one model.

    Args:
        is_aliased: let layers share experts where they do not fit.
        trace: also write a timeline of the last shape's prompt, for Perfetto.

    Raises:
        ValueError: the model does not fit; the message says how much is missing.
    """
    config = truncated(MODELS[shapes[0].model](), shapes[0].layers, has_drafts=False)
    plans = [plan_memory(config, s.prompt, 1, chunk=min(s.chunk, s.prompt)) for s in shapes]
    made = fitting_model(config, plans, is_aliased)
    for place, shape in enumerate(shapes):
        is_last = place == len(shapes) - 1
        with torch.no_grad():
            yield _Bench(made, shape).measure(machine, trace if is_last else None)


class _Bench:
    """One request's prompt, cached again and again in the same place."""

    def __init__(self, made: RandomModel, shape: Shape) -> None:
        self.made, self.shape = made, shape
        chunk = min(shape.chunk, shape.prompt)
        self.cache = random_cache(made.model, 1, shape.prompt, 0, chunk)
        self.manager = CacheManager(self.cache)
        self.slot = self.manager.admit(shape.prompt)
        self.tokens = torch.randint(made.model.config.vocab_size, (shape.prompt,)).tolist()

    def measure(self, machine: Machine, trace: Path | None) -> Result:
        for _ in range(WARM_UP):
            self.run()
        times = [elapsed_microseconds(self.run) for _ in range(ROUNDS)]
        config = self.made.model.config
        return Result(
            shape=self.shape,
            layers=config.num_hidden_layers,
            aliased_layers=self.made.aliased_layers,
            microseconds=statistics.median(times),
            floor=self.floor(machine),
            kernels=kernel_times(self.run, trace),
        )

    def run(self) -> torch.Tensor:
        """The token after the prompt, [1, 1]."""
        self.manager.truncate(self.slot, 0)
        self.manager.extend(self.slot, self.shape.prompt)
        for start, end in self._spans():
            count = end - start
            step = self.manager.step([self.slot], [count], count)
            inputs = known_inputs(step, GREEDY, [self.tokens[start:end]])
            is_last = end == self.shape.prompt
            found = prefill(self.made.model, self.cache, inputs, 0, is_last)
        return found

    def floor(self, machine: Machine) -> float:
        """Each chunk's layers, with the keys that its middle token sees, and one token's head."""
        config = self.made.model.config
        floors, total = StepFloor(config, machine), 0.0
        unused = 1 - config.num_experts_per_tok / config.n_routed_experts
        for start, end in self._spans():
            distinct = config.n_routed_experts * (1 - unused ** (end - start))
            load = Load(1, end - start, (start + end) // 2, distinct)
            total += sum(floors.layer(spec, load) for spec in config.schedule)
        return total + floors.head(1)

    def _spans(self) -> list[tuple[int, int]]:
        size, end = self.shape.chunk, self.shape.prompt
        return [(start, min(start + size, end)) for start in range(0, end, size)]


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {**asdict(result), "tokens_per_second": result.tokens_per_second}


def cells(row: Mapping[str, Any], is_bold: bool = False) -> list[str]:
    """A row of a record under `COLUMNS`."""
    time, shape = row["microseconds"], row["shape"]
    found = f"{time / 1e3:.1f}"
    return [
        shape["model"],
        layers_cell(row),
        f"{shape['prompt']}",
        f"{shape['chunk']}",
        f"**{found}**" if is_bold else found,
        f"{row['floor'] / 1e3:.1f}",
        f"{row['floor'] / time:.0%}",
        f"{row['tokens_per_second']:.0f}",
    ]
