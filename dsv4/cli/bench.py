"""`dsv4 bench`: time the kernels on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

# A user shape: tokens, heads, compressed keys, window keys.
SHAPE_FORMAT = "T,HEADS,TOP_K,WINDOW"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("bench", help="time the kernels on this GPU")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    attention = benchmarks.add_parser(
        "attention",
        help="sparse_fmha_with_swa: microseconds, rates, the GPU's floor, and peers",
        description="CUDA-graph replays over rotating inputs larger than L2, medians. The floor is "
        "the larger of bytes over copy bandwidth and FLOPs over matmul rate, both measured now.",
    )
    attention.add_argument(
        "--shape",
        action="append",
        type=_shape,
        metavar=SHAPE_FORMAT,
        help="measure this shape instead of the model table (repeatable)",
    )
    attention.add_argument("--num-splits", type=int, help="fixed KV splits instead of the choice")
    attention.add_argument("--no-peers", action="store_true", help="leave the torch peers out")
    attention.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    attention.add_argument("--plot", type=Path, metavar="FILE", help="also draw a roofline (PNG)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from dsv4.bench import attention, peers, report

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    shapes = attention.model_shapes()
    if args.shape:
        shapes = [attention.Shape("user", *numbers) for numbers in args.shape]
    machine = attention.Machine.measure()
    print(
        f"{machine.name}: copy {machine.bandwidth / 1e12:.2f} TB/s, "
        f"matmul {machine.rate / 1e12:.0f} TFLOP/s"
    )
    names = [] if args.no_peers else list(peers.PEERS)
    header = report.table_header(names)
    print(header)
    print("|" + "---|" * (header.count("|") - 1))
    results = []
    for result in attention.run(
        shapes, machine, num_splits=args.num_splits, with_peers=not args.no_peers
    ):
        results.append(result)
        print(report.table_row(result, names), flush=True)
    op, launch = attention.host_cost()
    print(f"host: {op:.1f} us per call of the operator, {launch:.1f} us of them the launch itself")
    if args.json is not None:
        args.json.write_text(report.to_json(machine, results) + "\n")
    if args.plot is not None:
        report.plot(machine, results, args.plot)
    return 0


def _shape(text: str) -> tuple[int, int, int, int]:
    try:
        tokens, heads, top_k, window = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {SHAPE_FORMAT}") from None
    if min(tokens, heads) < 1 or min(top_k, window) < 0 or top_k + window == 0:
        raise argparse.ArgumentTypeError(f"{text!r} has nothing to attend to")
    return tokens, heads, top_k, window
