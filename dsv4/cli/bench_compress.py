"""`dsv4 bench compress`: time the compressors' steps on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

SHAPE_FORMAT = "B,KIND"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "compress",
        help="compressors at a block's end: microseconds, and the GPU's floor",
        description="CUDA-graph replays of one launch after another, each with a state of its own; "
        "medians. The floor is bytes over memory bandwidth, measured now. Results are compared "
        "with the torch implementation before anything is timed.",
    )
    more = "measure B requests of KIND (CSA, HCA, indexer) instead of all (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import compress

    return bench_rows.measure(args, "compress", compress)


def parse_shape(text: str) -> tuple[int, str]:
    """Requests and kind of a `SHAPE_FORMAT`, for argparse."""
    count, _, kind = text.partition(",")
    if not count.isdecimal() or int(count) < 1 or kind not in ("CSA", "HCA", "indexer"):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected {SHAPE_FORMAT}")
    return int(count), kind
