"""`dsv4 bench linear`: time every projection of the released models on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.quoting import quoted

SHAPE_FORMAT = "PROJECTION,T"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "linear",
        help="every projection of Flash and Pro, and a chain of dependent launches: microseconds, "
        "bytes per second, the GPU's floor, cuBLAS, DeepGEMM",
        description="CUDA-graph replays over rotating weights larger than L2, medians; each "
        "projection as a layer calls it. The floor is the larger of bytes over memory bandwidth "
        "and FLOPs over the rates of bf16 and twice that, both measured now. Peers multiply weight "
        "by weight, FP8 ones with codes that were made before, cuBLAS with one scale. Outputs are "
        "compared with products in fp32 before anything is timed.",
    )
    more = "measure this projection, by the table's name, and number of tokens instead (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    bench_rows.add_vllm_option(parser, "DeepGEMM")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the projections; print the table while it grows."""
    from dsv4.bench import linear, linear_peers

    def peers() -> list[linear_peers.Peer]:
        return [] if args.no_peers else list(linear_peers.find(args.vllm))

    return bench_rows.measure(args, "linear", linear, peers)


def parse_shape(text: str) -> tuple[str, int]:
    """Projection and tokens of a `SHAPE_FORMAT`, for argparse."""
    from dsv4.bench.linear import PROJECTIONS

    label, _, tokens = text.rpartition(",")
    if label not in PROJECTIONS or not tokens.isdecimal() or int(tokens) < 1:
        names = "; ".join(PROJECTIONS)
        raise argparse.ArgumentTypeError(
            f"got {quoted(text)}, expected {SHAPE_FORMAT}: one of {names}"
        )
    return label, int(tokens)
