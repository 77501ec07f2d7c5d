"""`dsv4 bench step`: time whole decode steps of a released model on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_model
from dsv4.quoting import quoted


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "step",
        help="whole decode steps of Flash or Pro: milliseconds, layers by kind, launches, floor",
        description="Replays of one CUDA graph: all layers, head, sampling, and the new tokens fed "
        "back on the device. Weights and keys are random; layers whose experts do not fit share "
        "those of others, several GB of other reads apart. The floor counts every weight, every "
        "expert that was used and every key once, at the bandwidth and rate measured now.",
    )
    bench_model.add_options(parser)
    bench_model.add_batch(parser)
    parser.add_argument(
        "--context",
        type=bench_model.count,
        action="append",
        metavar="TOKENS",
        help="of each (repeatable)",
    )
    parser.add_argument(
        "--draft", action="store_true", help="verify one draft token a step, made by the MTP layer"
    )
    parser.add_argument(
        "--acceptance",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="drafts that count as accepted, in a fixed pattern (default 0.8)",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="give every request the bits that it has alone",
    )
    parser.add_argument(
        "--kv-format", choices=("bf16", "fp8"), help="of cached keys (default: the model's)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the steps."""
    from dsv4.bench import step

    drafts, share = (1, args.acceptance) if args.draft else (0, 0.0)
    options = (drafts, share, args.batch_invariant, args.kv_format)
    shapes = [
        step.Shape(args.model, args.layers, batch, context, *options)
        for context in args.context or (32768,)
        for batch in args.batch or step.BATCHES
    ]
    named = "B = {batch}, context {context}".format_map
    return bench_model.measure(args, "step", step, shapes, named)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected a share between 0 and 1")
    return value
