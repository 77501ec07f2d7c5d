"""`dsv4 bench prefill`: time the prefill of a prompt by a released model on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_model


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "prefill",
        help="prefill of a prompt by Flash or Pro: milliseconds, tokens/s, floor, kernels",
        description="One request's prompt in chunks, as an engine runs it, the first token's "
        "sampling included. Weights are random; layers whose experts do not fit share those of "
        "others. The floor counts each chunk's weights and keys once, or their FLOPs, at the "
        "bandwidth and rate measured now.",
    )
    bench_model.add_options(parser)
    parser.add_argument(
        "--prompt",
        type=bench_model.count,
        action="append",
        metavar="TOKENS",
        help="tokens of the prompt (repeatable)",
    )
    parser.add_argument(
        "--chunk",
        type=bench_model.count,
        action="append",
        metavar="TOKENS",
        help="of a forward (repeatable)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the prompts."""
    from dsv4.bench import prefill

    shapes = [
        prefill.Shape(args.model, args.layers, prompt, chunk)
        for prompt in args.prompt or (prefill.PROMPT,)
        for chunk in args.chunk or prefill.CHUNKS
    ]
    named = "a prompt of {prompt}, chunks of {chunk}".format_map
    return bench_model.measure(args, "prefill", prefill, shapes, named)
