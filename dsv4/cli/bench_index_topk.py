"""`dsv4 bench index_topk`: time the indexer's choice of entries on this machine's GPU."""

from __future__ import annotations

import argparse

from dsv4.cli import bench_rows
from dsv4.cli.bench_rms_norm_fp8 import SHAPE_FORMAT, parse_shape
from dsv4.kernels.kit.index_entry import INDEX_FORMATS, MODEL_FORMAT


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "index_topk",
        help="scores of index keys and selection: microseconds, and the GPU's floor",
        description="CUDA-graph replays of one launch after another, each with keys of its own; "
        "medians. The floor is bytes over memory bandwidth, measured now. Results are compared "
        "with the oracle before anything is timed.",
    )
    more = "measure T tokens of D entries each instead of the models' (repeatable)"
    bench_rows.add_options(parser, parse_shape, SHAPE_FORMAT, more)
    help_ = "format of the keys (repeatable; default: that of this package's caches)"
    parser.add_argument("--keys", action="append", choices=INDEX_FORMATS, help=help_)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the operator; print the table while it grows."""
    from dsv4.bench import index_topk

    shapes = args.shape or [(each.tokens, each.entries) for each in index_topk.model_shapes()]
    args.shape = [(*sizes, keys) for sizes in shapes for keys in args.keys or (MODEL_FORMAT,)]
    return bench_rows.measure(args, "index_topk", index_topk)
