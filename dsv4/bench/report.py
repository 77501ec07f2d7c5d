"""Benchmark results as Markdown tables, as JSON records, and as a roofline plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dsv4.bench.machine import Machine, circumstances


def table_line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def table_head(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return table_line(columns) + "\n|" + "---|" * len(columns)


def record(
    family: str, machine: Machine, results: Sequence[Mapping[str, Any]], **extra: Any
) -> dict[str, Any]:
    """What a run measured, on which machine, by which command and commit."""
    return {
        "family": family,
        **circumstances(),
        "machine": asdict(machine),
        **extra,
        "results": list(results),
    }


def write_record(path: Path, found: Mapping[str, Any]) -> None:
    """Write a record as JSON, one result a line."""
    lines = [
        f" {json.dumps(name)}: {json.dumps(value)}"
        for name, value in found.items()
        if name != "results"
    ]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["results"])
    lines.append(f' "results": [\n{rows}\n ]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def layers_cell(row: Mapping[str, Any]) -> str:
    """Layers of a whole model that was timed, and how many of them share experts."""
    aliased = row["aliased_layers"]
    return f"{row['layers']} ({aliased} aliased)" if aliased else f"{row['layers']}"


class RooflinePoint(NamedTuple):
    """A measurement under the roof."""

    name: str  # of its series
    label: str
    intensity: float  # FLOP per byte
    teraflops: float


def plot(machine: Machine, points: Sequence[RooflinePoint], path: Path) -> None:
    """FLOP/s over FLOP per byte, one point per shape."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'dsv4[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [point.intensity for point in points]
    ridge = machine.rate / machine.bandwidth
    ends = [min(*intensities, ridge) / 2, ridge, max(*intensities, ridge) * 2]
    roof = [min(machine.rate, end * machine.bandwidth) / 1e12 for end in ends]
    axes.plot(ends, roof, color="black", label=f"{machine.name}: memory, matmul")
    for name in dict.fromkeys(point.name for point in points):
        series = [point for point in points if point.name == name]
        axes.scatter([x.intensity for x in series], [x.teraflops for x in series], label=name)
        for point in series:
            axes.annotate(point.label, (point.intensity, point.teraflops), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
