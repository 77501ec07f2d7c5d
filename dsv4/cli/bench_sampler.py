"""`dsv4 bench sampler`: time the choice of tokens from logits on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

SHAPE_FORMAT = "B,OPTIONS"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "sampler",
        help="tokens from logits: microseconds, and the GPU's floor",
        description="CUDA-graph replays over rotating inputs, medians. The floor is bytes of the "
        "logits over memory bandwidth, measured now. Tokens are compared with the torch "
        "implementation before anything is timed.",
    )
    more = "measure B rows with temperature, top-p, top-k, min-p or all instead (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import sampler

    return bench_rows.measure(args, "sampler", sampler)


def parse_shape(text: str) -> tuple[int, str]:
    """Rows and options of a `SHAPE_FORMAT`, for argparse."""
    from dsv4.bench.sampler import OPTIONS

    rows, _, options = text.partition(",")
    if not rows.isdecimal() or int(rows) < 1 or options not in OPTIONS:
        raise argparse.ArgumentTypeError(
            f"got {quoted(text)}, expected {SHAPE_FORMAT} with options of {', '.join(OPTIONS)}"
        )
    return int(rows), options
