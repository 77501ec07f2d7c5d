"""`dsv4 bench merged_linear`: time linears of one input in one launch on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

SHAPE_FORMAT = "INPUT,T"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "merged_linear",
        help="linears of one input, FP8 and bf16: microseconds, bytes per second, the GPU's floor",
        description="CUDA-graph replays over rotating weights larger than L2, medians; the input "
        "is bf16, its quantisation included, or its codes are given. The floor is the larger of "
        "bytes over memory bandwidth and FLOPs over the rates of bf16 and twice that, both "
        "measured now. Outputs are compared with those of each weight by itself before anything "
        "is timed; that is timed, too.",
    )
    more = "measure this input, by the table's name, and number of tokens instead (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import merged_linear

    return bench_rows.measure(args, "merged_linear", merged_linear)


def parse_shape(text: str) -> tuple[str, int]:
    """Input and tokens of a `SHAPE_FORMAT`, for argparse."""
    from dsv4.ops.merged_linear import MODEL_INPUTS

    label, _, tokens = text.partition(",")
    if label not in MODEL_INPUTS or not tokens.isdecimal() or int(tokens) < 1:
        inputs = ", ".join(MODEL_INPUTS)
        raise argparse.ArgumentTypeError(
            f"got {quoted(text)}, expected {SHAPE_FORMAT}: one of {inputs}"
        )
    return label, int(tokens)
