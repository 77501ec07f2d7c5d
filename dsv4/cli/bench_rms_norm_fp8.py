"""`dsv4 bench rms_norm_fp8`: time RMSNorm with FP8 output on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

SHAPE_FORMAT = "T,D"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "rms_norm_fp8",
        help="RMSNorm with FP8 output: microseconds, bytes per second, the GPU's floor",
        description="CUDA-graph replays over rotating inputs, medians; few rows stay in L2. The "
        "floor is bytes over memory bandwidth, measured now. Codes and scales are compared with "
        "the torch implementation, bit for bit, before anything is timed.",
    )
    parser.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        metavar=SHAPE_FORMAT,
        help="measure rows of this size instead of the models' (repeatable)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    import torch

    from dsv4.bench import report
    from dsv4.bench import rms_norm_fp8 as bench
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
        report.write_record(args.json, report.record("rms_norm_fp8", machine, rows))
    return 0


def parse_shape(text: str) -> tuple[int, int]:
    """Rows and elements of a row of a `SHAPE_FORMAT`, for argparse."""
    try:
        tokens, dim = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {SHAPE_FORMAT}") from None
    if tokens < 1 or dim < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has no rows")
    return tokens, dim
