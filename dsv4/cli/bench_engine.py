"""`dsv4 bench engine`: time an engine's decode steps of a released model on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_model


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "engine",
        help="decode steps of an engine that runs Flash or Pro: tokens/s, time between two steps",
        description="Greedy requests of random prompts and weights, steps as `Engine.step` runs "
        "them; layers whose experts do not fit share those of others. The time between two steps "
        "is taken from the GPU's clock.",
    )
    bench_model.add_options(parser)
    bench_model.add_batch(parser)
    parser.add_argument(
        "--prompt", type=bench_model.count, metavar="TOKENS", help="of each request"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the steps."""
    from dsv4.bench import engine

    shapes = [
        engine.Shape(args.model, args.layers, batch, args.prompt or engine.PROMPT)
        for batch in args.batch or engine.BATCHES
    ]
    named = "B = {batch}, prompts of {prompt}".format_map
    return bench_model.measure(args, "engine", engine, shapes, named)
