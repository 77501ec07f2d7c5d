"""`dsv4 bench` of a family whose results are rows of sizes: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType

from dsv4.cli.output_file import output_file


def add_options(
    parser: argparse.ArgumentParser, parse_shape: Callable[[str], tuple], metavar: str, help: str
) -> None:
    """`--shape`, read by `parse_shape`, and `--json`."""
    parser.add_argument("--shape", action="append", type=parse_shape, metavar=metavar, help=help)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results here"
    )


def measure(args: argparse.Namespace, family: str, bench: ModuleType) -> int:
    """Time a family's operator; print the table while it grows."""
    import torch

    from dsv4.bench import report
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
        report.write_record(args.json, report.record(family, machine, rows))
    return 0
