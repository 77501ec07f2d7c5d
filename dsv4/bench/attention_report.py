"""Results of the attention benchmark: rows of its table, records, and points of its roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dsv4.bench.attention import HostCost, Result
from dsv4.bench.report import RooflinePoint
from dsv4.bench.shapes import sizes_of

COLUMNS = ("shape", "T", "heads", "keys", "splits", "us", "TFLOP/s", "GB/s", "floor us", "of floor")


def columns(peers: Sequence[str]) -> list[str]:
    """Titles of a table whose last columns are the peers' times."""
    return [*COLUMNS, *(f"{name} us" for name in peers)]


def as_row(result: Result) -> dict[str, Any]:
    """A result as records keep it."""
    return {
        "shape": sizes_of(result.case),
        "num_splits": result.num_splits,
        "microseconds": result.microseconds,
        "floor": result.floor,
        "error": result.error,
        "peers": result.peers,
        "failures": result.failures,
        "teraflops": result.teraflops,
        "gigabytes_per_second": result.gigabytes,
    }


def cells(row: Mapping[str, Any], peers: Sequence[str], is_bold: bool = False) -> list[str]:
    """A row of a record under `columns`; a peer without a time has "-"."""
    shape, time = row["shape"], row["microseconds"]
    ours = f"**{time:.1f}**" if is_bold else f"{time:.1f}"
    return [
        shape["name"],
        str(shape["tokens"]),
        str(shape["heads"]),
        str(shape["top_k"] + shape["window"]),
        str(row["num_splits"]),
        ours,
        f"{row['teraflops']:.0f}",
        f"{row['gigabytes_per_second']:.0f}",
        f"{row['floor']:.1f}",
        f"{row['floor'] / time:.0%}",
        *(f"{row['peers'][name]:.1f}" if name in row["peers"] else "-" for name in peers),
    ]


def host_row(host: HostCost) -> dict[str, float]:
    """The host's cost of a call as records keep it."""
    return {**asdict(host), "beyond_the_launch": host.beyond}


def roofline(results: Sequence[Result]) -> list[RooflinePoint]:
    """One point per result."""
    return [
        RooflinePoint(
            result.case.name,
            f"T={result.case.tokens}",
            result.case.flops / result.case.bytes,
            result.teraflops,
        )
        for result in results
    ]
