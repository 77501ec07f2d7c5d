"""`dsv4 bench rms_norm_fp8`: time RMSNorm with FP8 output on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

SHAPE_FORMAT = "T,D"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "rms_norm_fp8",
        help="RMSNorm with FP8 output: microseconds, bytes per second, the GPU's floor",
        description="CUDA-graph replays over rotating inputs, medians; few rows stay in L2. The "
        "floor is bytes over memory bandwidth, measured now. Codes and scales are compared with "
        "the torch implementation, bit for bit, before anything is timed.",
    )
    more = "measure rows of this size instead of the models' (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import rms_norm_fp8

    return bench_rows.measure(args, "rms_norm_fp8", rms_norm_fp8)


def parse_shape(text: str) -> tuple[int, int]:
    """Rows and elements of a row of a `SHAPE_FORMAT`, for argparse."""
    try:
        tokens, dim = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected {SHAPE_FORMAT}") from None
    if tokens < 1 or dim < 1:
        raise argparse.ArgumentTypeError(f"{quoted(text)} has no rows")
    return tokens, dim
