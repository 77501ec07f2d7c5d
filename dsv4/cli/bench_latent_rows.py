"""`dsv4 bench latent_rows`: time what follows the projections of a layer's input on this GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

KINDS = ("CSA", "HCA", "SWA")
SHAPE_FORMAT = "T,KIND"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "latent_rows",
        help="norms, keys and compression of a step in one launch: microseconds, and separately",
        description="CUDA-graph replays of one launch after another, each with a cache of its own; "
        "medians. Beside it the same work by the separate operators. The floor is bytes over "
        "memory bandwidth, measured now. Results are compared with the torch implementation before "
        "anything is timed.",
    )
    more = "measure T requests of a layer of KIND (CSA, HCA, SWA) instead of all (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import latent_rows

    return bench_rows.measure(args, "latent_rows", latent_rows)


def parse_shape(text: str) -> tuple[int, str]:
    """Requests and kind of a `SHAPE_FORMAT`, for argparse."""
    count, _, kind = text.partition(",")
    if not count.isdecimal() or int(count) < 1 or kind not in KINDS:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected {SHAPE_FORMAT}")
    return int(count), kind
