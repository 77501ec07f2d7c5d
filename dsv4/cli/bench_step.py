"""`dsv4 bench step`: time whole decode steps of a released model on this machine's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv4.cli.output_file import output_file
from dsv4.quoting import quoted


def add_parser(benchmarks) -> None:
    parser = benchmarks.add_parser(
        "step",
        help="whole decode steps of Flash or Pro: milliseconds, layers by kind, launches, floor",
        description="Replays of one CUDA graph: all layers, head, sampling, and the new tokens fed "
        "back on the device. Weights and keys are random; layers whose experts do not fit share "
        "those of others, several GB of other reads apart. The floor counts every weight, every "
        "expert that was used and every key once, at the bandwidth and rate measured now.",
    )
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--layers", type=_count, metavar="N", help="its first N layers alone")
    parser.add_argument(
        "--alias-experts", action="store_true", help="let layers share experts that do not fit"
    )
    parser.add_argument(
        "--batch", type=_count, action="append", metavar="B", help="requests (repeatable)"
    )
    parser.add_argument(
        "--context", type=_count, action="append", metavar="TOKENS", help="of each (repeatable)"
    )
    parser.add_argument(
        "--draft", action="store_true", help="verify one draft token a step, made by the MTP layer"
    )
    parser.add_argument(
        "--acceptance",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="drafts that count as accepted, in a fixed pattern (default 0.8)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results here"
    )
    parser.add_argument(
        "--trace", type=output_file, metavar="FILE", help="timeline of the last step, for Perfetto"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the steps; print the table while it grows, and the kernels of each step."""
    import torch

    from dsv4.bench import report, step
    from dsv4.bench.machine import Machine

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    drafts, share = (1, args.acceptance) if args.draft else (0, 0.0)
    shapes = [
        step.Shape(args.model, args.layers, batch, context, drafts, share)
        for context in args.context or (32768,)
        for batch in args.batch or step.BATCHES
    ]
    machine = Machine.measure()
    print(machine)
    print(report.table_head(step.COLUMNS))
    rows = []
    trace = Path(args.trace) if args.trace is not None else None
    try:
        for result in step.measure(shapes, machine, args.alias_experts, trace):
            rows.append(step.as_row(result))
            print(report.table_line(step.cells(rows[-1])), flush=True)
    finally:
        # What was measured is told also where a later shape fails.
        for row in rows:
            _print_kernels(row)
    if args.json is not None:
        report.write_record(args.json, report.record("step", machine, rows))
    return 0


def _print_kernels(row: dict) -> None:
    shape, total = row["shape"], sum(kernel[2] for kernel in row["kernels"])
    print(f"\nkernels of B = {shape['batch']}, context {shape['context']}, {total / 1e3:.2f} ms:")
    for name, calls, time in row["kernels"]:
        print(f"{time:10.1f} us {calls:6} x  {name[:90]}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected a number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected a share between 0 and 1")
    return value
