"""`dsv4 bench fp8_linear`: time linears with FP8 weights on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

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
    parser.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        metavar=SHAPE_FORMAT,
        help="measure this size instead of the models' (repeatable)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    import torch

    from dsv4.bench import fp8_linear as bench
    from dsv4.bench import report
    from dsv4.bench.machine import Machine

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    shapes = [bench.Shape(*numbers) for numbers in args.shape or ()] or bench.model_shapes()
    machine = Machine.measure()
    print(machine)
    print(report.table_head(bench.COLUMNS))
    rows = []
    for result in bench.measure(shapes, machine):
        rows.append(bench.as_row(result))
        print(report.table_line(bench.cells(rows[-1])), flush=True)
    if args.json is not None:
        report.write_record(args.json, report.record("fp8_linear", machine, rows))
    return 0


def parse_shape(text: str) -> tuple[int, int, int]:
    """Tokens, output and input features of a `SHAPE_FORMAT`, for argparse."""
    try:
        tokens, rows, width = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {SHAPE_FORMAT}") from None
    if min(tokens, rows, width) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is empty")
    return tokens, rows, width
