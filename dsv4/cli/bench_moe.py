"""`dsv4 bench moe`: time mixture-of-experts layers on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.cli.arguments import input_path
from dsv4.quoting import quoted

SHAPE_FORMAT = "MODEL,T"


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "moe",
        help="mixture-of-experts layers: microseconds, bytes per second, the GPU's floor, torch, "
        "DeepGEMM, Marlin, Humming",
        description="CUDA-graph replays of whole layers, router, sort and quantisation included; "
        "every call has its own tokens, routed at random, so that each replay reads other experts. "
        "The floor is the larger of bytes over memory bandwidth, for the mean number of distinct "
        "experts of a call, and FLOPs over twice the bf16 rate, both measured now. Results are "
        "compared with the torch implementation before anything is timed. Peers have the routed "
        "experts alone, their tokens' experts given.",
    )
    more = (
        "measure this layer (Flash, Pro, Flash-NVFP4, ...) and number of tokens instead of all "
        "(repeatable)"
    )
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    bench_rows.add_vllm_option(parser, "Marlin and DeepGEMM")
    parser.add_argument(
        "--humming", type=input_path, metavar="FOLDER",
        help="folder of an unpacked humming-kernels wheel; needs --vllm",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import moe, moe_peers

    def peers() -> list[moe.NamedPeer]:
        return [] if args.no_peers else list(moe_peers.find(args.vllm, args.humming))

    return bench_rows.measure(args, "moe", moe, peers)


def parse_shape(text: str) -> tuple[str, int]:
    """Model and tokens of a `SHAPE_FORMAT`, for argparse."""
    from dsv4.bench.moe import LAYERS

    model, _, tokens = text.partition(",")
    if model not in LAYERS or not tokens.isdecimal() or int(tokens) < 1:
        models = ", ".join(LAYERS)
        raise argparse.ArgumentTypeError(
            f"got {quoted(text)}, expected {SHAPE_FORMAT}: {models}, tokens"
        )
    return model, int(tokens)
