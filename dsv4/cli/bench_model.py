"""`dsv4 bench` of whole released models: the options in common, and what is printed."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from dsv4.cli import bench_rows
from dsv4.cli.output_file import output_file
from dsv4.quoting import quoted


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--layers`, `--alias-experts`, `--json`, `--trace` and `--plot`."""
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--layers", type=count, metavar="N", help="its first N layers alone")
    parser.add_argument(
        "--alias-experts", action="store_true", help="let layers share experts that do not fit"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results here"
    )
    parser.add_argument(
        "--trace", type=output_file, metavar="FILE", help="timeline of the last row, for Perfetto"
    )
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw that timeline (PNG)"
    )


def add_batch(parser: argparse.ArgumentParser) -> None:
    """`--batch`."""
    parser.add_argument(
        "--batch", type=count, action="append", metavar="B", help="requests (repeatable)"
    )


def measure(
    args: argparse.Namespace,
    family: str,
    bench: ModuleType,
    shapes: Sequence,
    named: Callable[[dict], str],
) -> int:
    """Time the shapes; print the table while it grows, and the kernels of each row.

    Args:
        named: a shape as the list of its kernels is headed.
    """
    import torch

    from dsv4.bench import report, timeline
    from dsv4.bench.machine import Machine

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    machine = Machine.measure()
    print(machine)
    print(report.table_head(bench.COLUMNS))
    folder = tempfile.TemporaryDirectory()
    trace = Path(args.trace) if args.trace is not None else None
    if trace is None and args.plot is not None:
        trace = Path(folder.name) / "trace.json"
    with bench_rows.recorded(args.json, family, machine) as rows:
        try:
            for result in bench.measure(shapes, machine, args.alias_experts, trace):
                rows.append(bench.as_row(result))
                print(report.table_line(bench.cells(rows[-1])), flush=True)
        finally:
            # What was measured is told also where a later shape fails.
            for row in rows:
                total = sum(kernel[2] for kernel in row["kernels"])
                print(f"\nkernels of {named(row['shape'])}, {total / 1e3:.2f} ms:")
                for name, calls, time in row["kernels"]:
                    print(f"{time:10.1f} us {calls:6} x  {name[:90]}")
    if args.plot is not None:
        timeline.draw(trace, args.plot)
    folder.cleanup()
    return 0


def count(text: str) -> int:
    """A number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected a number of at least 1")
    return int(text)
