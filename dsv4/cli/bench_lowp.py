"""`dsv4 bench lowp`: time quantised attention on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.cli.arguments import input_path
from dsv4.quoting import quoted

SHAPE_FORMAT = "D,L,CAUSAL,KEY_HEADS"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "lowp",
        help="quantised attention: TFLOP/s with and without the quantisers, accuracy, peers",
        description="CUDA-graph replays, medians; 4 sequences of 32 heads of queries. Accuracy is "
        "that against exact attention on the inputs, in SageAttention's terms. Peers are torch's "
        "attention, and FlashAttention 3, cuDNN's FP8 attention and SageAttention where they can "
        "be imported, or are given as libraries.",
    )
    more = "measure D channels, L rows, CAUSAL 0 or 1, KEY_HEADS instead of the table (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    parser.add_argument(
        "--fa3", type=input_path, metavar="LIBRARY", help="_vllm_fa3_C.abi3.so of vLLM's wheel"
    )
    parser.add_argument(
        "--sage",
        type=input_path,
        metavar="LIBRARY",
        help="what `scripts/sage_parity library` builds",
    )
    parser.add_argument("--no-peers", action="store_true", help="time our kernels alone")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operators and their peers; print the table while it grows."""
    import torch

    from dsv4.bench import lowp, report
    from dsv4.bench.lowp_peers import peers
    from dsv4.bench.machine import Machine

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    shapes = [lowp.Shape(*numbers) for numbers in args.shape or ()] or lowp.model_shapes()
    machine = Machine.measure()
    others = [] if args.no_peers else list(peers(args.fa3, args.sage))
    print(machine)
    print(report.table_head([*lowp.COLUMNS, *(f"{peer.name}, TFLOP/s" for peer in others)]))
    with bench_rows.recorded(args.json, "lowp", machine) as rows:
        for result in lowp.measure(shapes, others):
            rows.append(lowp.as_row(result))
            print(report.table_line(lowp.cells(rows[-1])), flush=True)
        print(f"\n{lowp.summary(rows)}")
    return 0


def parse_shape(text: str) -> tuple[int, int, bool, int]:
    """Channels, rows, whether causal, heads of keys of a `SHAPE_FORMAT`, for argparse."""
    try:
        dim, rows, causal, key_heads = (int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected {SHAPE_FORMAT}") from None
    if dim not in range(1, 257) or rows < 1 or causal not in (0, 1):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)}: D is 1 to 256, L positive, CAUSAL 0 or 1"
        )
    if key_heads not in (1, 2, 4, 8, 16, 32):
        raise argparse.ArgumentTypeError(f"{quoted(text)}: KEY_HEADS divides 32")
    return dim, rows, bool(causal), key_heads
