"""`dsv4 sim attention --model-table`: modelled times beside measured and published ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4.cli.sim_attention import (
    Workload,
    compile_attention,
    make_timing_call,
    timed_clusters,
)
from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import MACHINES, Machine, Prediction, predict

TOKENS = (1, 4, 16, 64, 128, 148, 256, 1024)
MODELS = {"Pro": (128, 1024), "Flash": (64, 512)}  # heads, compressed rows per token

# FLOP per cycle and SM of bf16 products: m64n256 and larger, both sources of machine.py.
PEAK = {"sm_100a": 8153, "sm_90a": 4096}

# (architecture, model, tokens) -> what others take for the shape, and in which precision.
PUBLISHED = {
    ("sm_100a", "Flash", 1): "26.6 fp8 KV, fused norm and RoPE (FlashMLA, vllm#57711)",
    ("sm_100a", "Flash", 15): "12.4 (FlashInfer cake, flashinfer#4573), 21.1 (trtllm-gen)",
    ("sm_100a", "Pro", 128): "27.1 fp8 (trtllm-gen, TensorRT-LLM#14823)",
}
HEADER = (
    "model", "T", "heads", "keys", "splits", "model us", "floor us", "of floor", "TFLOP/s",
    "busiest unit",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A row to make: what it is called, the work, and what a GPU or other kernels take for it."""

    name: str
    workload: Workload
    measured: float | None = None  # microseconds
    published: str = ""


@dataclass(frozen=True)
class Row:
    """One shape with its modelled time, and the floor that bytes and FLOPs set."""

    shape: Shape
    prediction: Prediction
    floor: float  # microseconds

    @property
    def error(self) -> float | None:
        """Relative error of the model, positive when it is too slow; None if nothing was
        measured."""
        if self.shape.measured is None:
            return None
        return self.prediction.microseconds / self.shape.measured - 1

    @property
    def columns(self) -> list[str]:
        """As text, in the order of `HEADER`, then what is known of the truth."""
        work, time = self.shape.workload, self.prediction.microseconds
        numbers = (work.tokens, work.heads, work.top_k + work.window, work.splits)
        known = self.shape.published
        if self.error is not None:
            known = f"{self.shape.measured:.1f} measured, model {self.error:+.0%}"
        return [
            self.shape.name,
            *map(str, numbers),
            f"{time:.1f}",
            f"{self.floor:.1f}",
            f"{self.floor / time:.0%}",
            f"{work.flops / time / 1e6:.0f}",
            self.prediction.longest.bound,
            known,
        ]


def model_shapes(arch: str) -> list[Shape]:
    """Pro and Flash at the usual numbers of tokens, and at those that others have published."""
    shapes = []
    for name, (heads, top_k) in MODELS.items():
        listed = {key[2] for key in PUBLISHED if key[:2] == (arch, name)}
        for tokens in sorted({*TOKENS, *listed}):
            published = PUBLISHED.get((arch, name, tokens), "")
            workload = Workload(arch, heads, top_k, tokens)
            shapes.append(Shape(name, workload, published=published))
    return shapes


def measured_shapes(arch: str, path: Path) -> list[Shape]:
    """The shapes that `dsv4 bench attention --json` measured; ValueError for another file."""
    try:
        results = json.loads(path.read_text())["results"]
        return [
            Shape(
                result["shape"]["name"],
                Workload(
                    arch,
                    **{name: result["shape"][name]
                       for name in ("heads", "top_k", "tokens", "head_dim", "window")},
                ),
                measured=result["microseconds"],
            )
            for result in results
        ]  # fmt: skip
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--measured: {path} is not what `dsv4 bench attention --json` writes ({error!r})"
        ) from None


def rows(shapes: Iterable[Shape]) -> Iterator[Row]:
    """Model each shape; kernels that differ in run-time sizes alone are compiled once."""
    simulations: dict[tuple, Simulation] = {}
    for shape in shapes:
        work = shape.workload
        key = (work.arch, work.heads, work.head_dim)
        if key not in simulations:
            compiled = compile_attention(replace(work, tokens=1))
            simulations[key] = Simulation.of_compiled(compiled.function)
        call = make_timing_call(work, seed=0)
        prediction = predict(
            simulations[key], *call.tensors, **call.options, choose=timed_clusters(work)
        )
        yield Row(shape, prediction, floor(work, MACHINES[work.arch]))


def floor(workload: Workload, machine: Machine) -> float:
    """Microseconds that no kernel beats: bytes over bandwidth or FLOPs over rate, as measured."""
    rate = PEAK[workload.arch] * machine.multiprocessors * machine.clock_ghz * 1e9
    return 1e6 * max(workload.bytes / machine.hbm_bytes_per_second, workload.flops / rate)


def print_table(arch: str, measured: Path | None) -> None:
    """Print the rows as Markdown while they come; with measurements, the mean error last."""
    shapes = model_shapes(arch) if measured is None else measured_shapes(arch, measured)
    print(f"{MACHINES[arch].name} model, {arch}: predictions, not measurements")
    print(_line([*HEADER, "published us" if measured is None else "measured us"]))
    print(_line(["---"] * (len(HEADER) + 1)))
    errors = []
    for row in rows(shapes):
        print(_line(row.columns), flush=True)
        if row.error is not None:
            errors.append(abs(row.error))
    if errors:
        mean, worst = sum(errors) / len(errors), max(errors)
        within = sum(error <= 0.25 for error in errors)
        print(
            f"model against measurement: mean error {mean:.0%}, worst {worst:.0%}, "
            f"within 25% for {within} of {len(errors)} shapes"
        )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
