"""`dsv4 compile`: compile kernels ahead of time, also on a machine without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from dsv4.arch import ARCHS
from dsv4.quoting import printable, quoted

if TYPE_CHECKING:
    from dsv4.ops.runtime.precompile import Outcome


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 compile`."""
    products = ", ".join(f"{arch.products} {arch.name}" for arch in ARCHS.values())
    parser = subparsers.add_parser(
        "compile", help="compile kernels ahead of time, no GPU needed", description=__doc__
    )
    archs = parser.add_mutually_exclusive_group(required=True)
    archs.add_argument(
        "--arch",
        action="append",
        choices=tuple(ARCHS),
        help=f"GPU architecture: {products}; repeatable",
    )
    archs.add_argument(
        "--all",
        dest="arch",
        action="store_const",
        const=list(ARCHS),
        help="every architecture",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help='kernels whose label has this, as --only "Flash" (repeatable; default: all)',
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print registers, spills and shared memory of every kernel",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=None,
        metavar="N",
        help="compile N kernels at a time (default: one per CPU)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile what Flash and Pro need of every operator, whole or split over GPUs.

    Returns 1 when any kernel failed to compile, or could not be stored.
    """
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs: got {args.jobs}, needs at least 1")
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError(
            "the kernel compiler is missing: "
            "pip install 'nvidia-cutlass-dsl>=4.8,<4.9' apache-tvm-ffi"
        )
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsv4.ops.runtime.cache import cache_root
    from dsv4.ops.runtime.precompile import precompile
    from dsv4.ops.runtime.registry import ahead_of_time

    keys = [
        (label, key)
        for arch in dict.fromkeys(args.arch)
        for label, key in ahead_of_time(arch)
        if args.only is None or any(text.lower() in label.lower() for text in args.only)
    ]
    if not keys:
        raise ValueError(f"--only: got {quoted(args.only)}, no kernel's label has any of it")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=len(keys))
        for outcome in precompile(keys, jobs=args.jobs or os.cpu_count() or 1, report=args.report):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=outcome.label)
    order = {label: place for place, (label, _) in enumerate(keys)}
    outcomes.sort(key=lambda outcome: order[outcome.label])
    _print(outcomes, args.report)
    failures = [outcome for outcome in outcomes if outcome.error]
    for outcome in failures:
        print(f"dsv4 compile: {outcome.label}: {printable(outcome.error)}", file=sys.stderr)
    kept = len(outcomes) - len(failures)
    print(f"{kept} of {len(outcomes)} kernels are in {printable(cache_root())}")
    return 1 if failures else 0


def _print(outcomes: list[Outcome], report: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel of", "seconds", "")
    if report:
        for heading in ("kernel", "registers", "spills", "SMEM"):
            table.add_column(heading)
    for outcome in outcomes:
        row = [outcome.label, f"{outcome.seconds:.1f}", "failed" if outcome.error else "ok"]
        if not outcome.kernels:
            table.add_row(*row)
        for kernel in outcome.kernels:
            spilled = kernel.spill_stores + kernel.spill_loads
            details = (kernel.registers, f"{spilled} B", f"{kernel.shared_memory} B")
            name = f"{kernel.name}, wgmma serialised" if kernel.serialized else kernel.name
            table.add_row(*row, name, *(str(value) for value in details))
            row = [""] * len(row)
    Console().print(table)
