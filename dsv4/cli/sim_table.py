"""`dsv4 sim attention --model-table`: modelled times beside measured and published ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4.cli.sim_attention import (
    Workload,
    compile_attention,
    make_timing_call,
    timed_clusters,
)
from dsv4.quoting import quoted
from dsv4.simulator.api import Simulation
from dsv4.simulator.timing import MACHINES, Machine, Prediction, predict
from dsv4.testing.attention import Case

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
class Subject:
    """Work to model: what it is called, and what a GPU or other kernels take for it."""

    name: str
    workload: Workload
    measured: float | None = None  # microseconds
    published: str = ""


@dataclass(frozen=True)
class Row:
    """Work with its modelled time, and the floor that bytes and FLOPs set."""

    subject: Subject
    prediction: Prediction
    floor: float  # microseconds

    @property
    def error(self) -> float | None:
        """Relative error of the model, positive when it is too slow; None if nothing was
        measured."""
        if self.subject.measured is None:
            return None
        return self.prediction.microseconds / self.subject.measured - 1

    @property
    def columns(self) -> list[str]:
        """As text, in the order of `HEADER`, then what is known of the truth."""
        work, time = self.subject.workload, self.prediction.microseconds
        case = work.case
        numbers = (case.tokens, case.heads, case.keys, work.splits)
        known = self.subject.published
        if self.error is not None:
            known = f"{self.subject.measured:.1f} measured, model {self.error:+.0%}"
        return [
            self.subject.name,
            *map(str, numbers),
            f"{time:.1f}",
            f"{self.floor:.1f}",
            f"{self.floor / time:.0%}",
            f"{case.flops / time / 1e6:.0f}",
            self.prediction.longest.bound,
            known,
        ]


def model_subjects(arch: str) -> list[Subject]:
    """Pro and Flash at the usual numbers of tokens, and at those that others have published."""
    subjects = []
    for name, (heads, top_k) in MODELS.items():
        listed = {key[2] for key in PUBLISHED if key[:2] == (arch, name)}
        for tokens in sorted({*TOKENS, *listed}):
            published = PUBLISHED.get((arch, name, tokens), "")
            workload = Workload(arch, Case.decode(tokens, heads, top_k))
            subjects.append(Subject(name, workload, published=published))
    return subjects


def measured_subjects(arch: str, path: Path) -> list[Subject]:
    """The shapes that `dsv4 bench attention --json` measured; ValueError for another file."""
    try:
        results = json.loads(path.read_text())["results"]
        return [
            Subject(
                result["shape"]["name"],
                Workload(arch, Case.decode(**result["shape"])),
                measured=result["microseconds"],
            )
            for result in results
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--measured: {path} is not what `dsv4 bench attention --json` writes ({quoted(error)})"
        ) from None


def rows(subjects: Iterable[Subject]) -> Iterator[Row]:
    """Model each of them; kernels that differ in run-time sizes alone are compiled once."""
    simulations: dict[tuple, Simulation] = {}
    for subject in subjects:
        work = subject.workload
        key = (work.arch, work.config)
        if key not in simulations:
            compiled = compile_attention(work, has_lines=False)
            simulations[key] = Simulation.of_compiled(compiled.function)
        call = make_timing_call(work, seed=0)
        prediction = predict(
            simulations[key], *call.args, **call.options, choose=timed_clusters(work)
        )
        yield Row(subject, prediction, floor(work, MACHINES[work.arch]))


def floor(workload: Workload, machine: Machine) -> float:
    """Microseconds that no kernel beats: bytes over bandwidth or FLOPs over rate, as measured."""
    case = workload.case
    rate = PEAK[workload.arch] * machine.multiprocessors * machine.clock_ghz * 1e9
    return 1e6 * max(case.bytes / machine.hbm_bytes_per_second, case.flops / rate)


def print_table(arch: str, measured: Path | None) -> None:
    """Print the rows as Markdown while they come; with measurements, the mean error last."""
    subjects = model_subjects(arch) if measured is None else measured_subjects(arch, measured)
    machine = MACHINES[arch]
    print(f"{machine.name} model, {arch}: predictions, not measurements; {machine.assumed}")
    print(_line([*HEADER, "published us" if measured is None else "measured us"]))
    print(_line(["---"] * (len(HEADER) + 1)))
    errors = []
    for row in rows(subjects):
        print(_line(row.columns), flush=True)
        if row.error is not None:
            errors.append(row.error)
    if errors:
        sizes = [abs(error) for error in errors]
        mean, signed = sum(sizes) / len(errors), sum(errors) / len(errors)
        within = sum(size <= 0.25 for size in sizes)
        print(
            f"model against measurement: mean error {mean:.1%}, signed {signed:+.1%}, worst "
            f"{max(sizes):.0%}, "
            f"within 25% for {within} of {len(errors)} shapes"
        )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
