"""Benchmark results as a table, as JSON, and as a roofline plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from dsv4.bench.attention import HostCost, Machine, Result


def table_header(peer_names: Sequence[str]) -> str:
    columns = ["shape", "T", "heads", "keys", "splits", "us", "TFLOP/s", "GB/s", "floor us"]
    columns.append("of floor")
    return "| " + " | ".join([*columns, *(f"{name} us" for name in peer_names)]) + " |"


def table_row(result: Result, peer_names: Sequence[str]) -> str:
    shape = result.shape
    cells = [
        shape.name,
        str(shape.tokens),
        str(shape.heads),
        str(shape.keys),
        str(result.num_splits),
        f"{result.microseconds:.1f}",
        f"{result.teraflops:.0f}",
        f"{result.gigabytes:.0f}",
        f"{result.floor:.1f}",
        f"{result.floor / result.microseconds:.0%}",
    ]
    for name in peer_names:
        cells.append(f"{result.peers[name]:.1f}" if name in result.peers else "-")
    return "| " + " | ".join(cells) + " |"


def to_json(machine: Machine, results: Sequence[Result], host: HostCost) -> str:
    rows = [
        {
            **asdict(result),
            "teraflops": result.teraflops,
            "gigabytes_per_second": result.gigabytes,
        }
        for result in results
    ]
    software = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine),
        "software": software,
        "host_microseconds": {**asdict(host), "beyond_the_launch": host.beyond},
        "results": rows,
    }
    return json.dumps(record, indent=1)


def plot(machine: Machine, results: Sequence[Result], path: Path) -> None:
    """Roofline: FLOP/s over FLOP per byte, one point per shape."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'dsv4[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [result.shape.flops / result.shape.bytes for result in results]
    ridge = machine.rate / machine.bandwidth
    ends = [min(*intensities, ridge) / 2, ridge, max(*intensities, ridge) * 2]
    roof = [min(machine.rate, end * machine.bandwidth) / 1e12 for end in ends]
    axes.plot(ends, roof, color="black", label=f"{machine.name}: memory, matmul")
    for name in dict.fromkeys(result.shape.name for result in results):
        points = [(i, r) for i, r in zip(intensities, results, strict=True) if r.shape.name == name]
        axes.scatter([i for i, _ in points], [r.teraflops for _, r in points], label=name)
        for intensity, result in points:
            text = f"T={result.shape.tokens}"
            axes.annotate(text, (intensity, result.teraflops), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
