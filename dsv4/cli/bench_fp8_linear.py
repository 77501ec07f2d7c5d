"""`dsv4 bench fp8_linear`: time linears with FP8 weights on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

SHAPE_FORMAT = "T,M,K"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "fp8_linear",
        help="linears with FP8 weights: microseconds, bytes per second, the GPU's floor",
        description="CUDA-graph replays over rotating weights larger than L2, medians; the input "
        "is bf16, its quantisation included. The floor is the larger of bytes over memory "
        "bandwidth and FLOPs over twice the bf16 rate, both measured now. Results are compared "
        "with fp32 products of the decoded weight before anything is timed.",
    )
    more = "measure this size instead of the models' (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import fp8_linear

    return bench_rows.measure(args, "fp8_linear", fp8_linear)


def parse_shape(text: str) -> tuple[int, int, int]:
    """Tokens, output and input features of a `SHAPE_FORMAT`, for argparse."""
    try:
        tokens, rows, width = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected {SHAPE_FORMAT}") from None
    if min(tokens, rows, width) < 1:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is empty")
    return tokens, rows, width
