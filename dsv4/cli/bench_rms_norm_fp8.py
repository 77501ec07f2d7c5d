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
    import torch

    from dsv4.bench import rms_norm_fp8 as bench
    from dsv4.bench.attention import Machine

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    shapes = [bench.Shape(*numbers) for numbers in args.shape or ()] or bench.model_shapes()
    machine = Machine.measure()
    print(
        f"{machine.name}: copy {machine.copy / 1e12:.2f} TB/s, read {machine.read / 1e12:.2f} TB/s"
    )
    print(bench.HEADER)
    print("|" + "---|" * (bench.HEADER.count("|") - 1))
    results = []
    for result in bench.measure(shapes, machine):
        results.append(result)
        print(result.row(), flush=True)
    if args.json is not None:
        args.json.write_text(bench.to_json(machine, results) + "\n")
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
