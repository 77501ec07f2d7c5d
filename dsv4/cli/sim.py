"""`dsv4 sim`: run the GPU kernels on this CPU, instruction by instruction, and check them."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.cli.sim_attention import Accuracy, CompiledKernel, Workload
    from dsv4.simulator import Report
    from dsv4.simulator.report import LaunchReport

# Kept here as well as in the simulator, which would import torch: `--help` must be instant.
ARCHITECTURES = ("sm_100a", "sm_90a")
SCHEDULES = ("eager", "lazy", "random")
SHOWN_FINDINGS = 5
CHECK_FAILED = 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 sim`."""
    parser = subparsers.add_parser(
        "sim", help="run a kernel in the GPU simulator, no GPU needed", description=__doc__
    )
    kernels = parser.add_subparsers(dest="kernel", required=True, metavar="KERNEL")
    attention = kernels.add_parser(
        "attention",
        help="one decode step of sparse_fmha_with_swa",
        description="Compile the attention kernel, simulate one decode step on random inputs, and "
        "compare the result with the FP32 oracle. Exit status 1 when it is wrong or racy.",
    )
    _add_shape(attention)
    attention.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="eager",
        help="when asynchronous work completes (default: at issue)",
    )
    attention.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    attention.add_argument("--no-races", action="store_true", help="no race check: faster")
    attention.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )

    parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    number("--tokens", 1, "tokens that decode at once")
    number("--heads", 128, "query heads")
    number("--top-k", 1024, "compressed rows per token")
    number("--window", 128, "rows of the sliding window")
    number("--head-dim", 512, "elements per head and row")
    parser.add_argument(
        "--num-splits", type=int, metavar="N", help="CTAs per token and 64 heads (default: chosen)"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate; the exit status is 1 when the result is wrong or the checker found a race."""
    workload = _workload(args)
    from dsv4.cli import sim_attention
    from dsv4.simulator import simulate

    compiled = sim_attention.compile_attention(workload)
    call = sim_attention.make_call(workload, args.seed)
    report = simulate(
        compiled.function,
        *call.tensors,
        **call.options,
        schedule=args.schedule,
        seed=args.seed,
        races=not args.no_races,
    )
    accuracy = sim_attention.check(call)
    if args.json:
        summary = _summary(workload, compiled, report, accuracy, not args.no_races)
        print(json.dumps(summary, indent=2))
    else:
        _print(workload, compiled, report, accuracy, not args.no_races)
    return 0 if accuracy.correct and not report.races else CHECK_FAILED


def _workload(args: argparse.Namespace) -> Workload:
    """The shape that the arguments describe; ValueError names the argument that is wrong."""
    for name in ("tokens", "heads", "head_dim"):
        value = getattr(args, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {value}, needs at least 1")
    for name in ("top_k", "window"):
        value = getattr(args, name)
        if value < 0:
            raise ValueError(f"--{name.replace('_', '-')}: got {value}, needs at least 0")
    if args.top_k + args.window == 0:
        raise ValueError("--top-k and --window: got 0 and 0, there is nothing to attend to")
    if args.num_splits is not None and args.num_splits < 1:
        raise ValueError(f"--num-splits: got {args.num_splits}, needs at least 1")
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError(
            "the kernel compiler is missing (it exists for Linux only): "
            "pip install 'nvidia-cutlass-dsl>=4.8,<4.9' apache-tvm-ffi"
        )
    from dsv4.cli.sim_attention import Workload

    return Workload(
        arch=args.arch,
        heads=args.heads,
        top_k=args.top_k,
        tokens=args.tokens,
        head_dim=args.head_dim,
        window=args.window,
        num_splits=args.num_splits,
    )


def _kernel_row(compiled: CompiledKernel, launch: LaunchReport) -> dict[str, object]:
    """What is known about one launch; None where the compiler said nothing."""
    found = [r for r in compiled.reports if f"{r.name}_object_at" in launch.kernel]
    said = found[0] if found else None
    return {
        "kernel": said.name if said else launch.kernel,
        "grid": list(launch.grid),
        "threads": launch.block[0] * launch.block[1] * launch.block[2],
        "registers": said.registers if said else None,
        "spill_bytes": said.spill_stores + said.spill_loads if said else None,
        "shared_memory": launch.shared_bytes,
        "tmem_columns": compiled.tmem_columns if launch.operations.get("tcgen05.mma") else 0,
        "coverage": str(launch.coverage),
        "warp_instructions": launch.instructions,
        "warp_instructions_per_second": round(launch.instructions_per_second),
    }


def _summary(
    workload: Workload,
    compiled: CompiledKernel,
    report: Report,
    accuracy: Accuracy,
    checked: bool,
) -> dict[str, object]:
    """Everything the tables say, for machines; `races` is null when nobody looked."""
    return {
        "workload": str(workload),
        "correct": accuracy.correct,
        "relative_error": accuracy.relative,
        "cosine": accuracy.cosine,
        "largest_element_error": accuracy.element,
        "lse_error": accuracy.lse,
        "races": [str(finding) for finding in report.races] if checked else None,
        "warnings": [str(finding) for finding in report.warnings] if checked else None,
        "kernels": [_kernel_row(compiled, launch) for launch in report.launches],
    }


def _print(
    workload: Workload,
    compiled: CompiledKernel,
    report: Report,
    accuracy: Accuracy,
    checked: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{workload}[/bold], simulated on this CPU")
    kernels = [_kernel_row(compiled, launch) for launch in report.launches]
    table = Table("", *[str(row["kernel"]) for row in kernels])
    for name in kernels[0]:
        if name != "kernel":
            table.add_row(name.replace("_", " "), *[_text(row[name]) for row in kernels])
    console.print(table)
    checks = Table("check", "result", "bound")
    for line in _check_rows(accuracy):
        checks.add_row(*line)
    checks.add_row("races", str(len(report.races)) if checked else "not checked", "0")
    console.print(checks)
    findings = [*report.races, *report.warnings]
    for finding in findings[:SHOWN_FINDINGS]:
        console.print(str(finding), markup=False)
    if len(findings) > SHOWN_FINDINGS:
        console.print(f"... and {len(findings) - SHOWN_FINDINGS} more (--json lists all)")


def _check_rows(accuracy: Accuracy) -> list[tuple[str, str, str]]:
    from dsv4.cli import sim_attention as bounds

    verdict = "[green]correct[/green]" if accuracy.correct else "[red]WRONG[/red]"
    return [
        ("output against the FP32 oracle", verdict, ""),
        ("relative error", f"{accuracy.relative:.2e}", f"{bounds.MAX_RELATIVE:.0e}"),
        ("1 - cosine", f"{1 - accuracy.cosine:.1e}", f"{1 - bounds.MIN_COSINE:.0e}"),
        ("largest error of an element", f"{accuracy.element:.1e}", f"{bounds.MAX_ELEMENT:.0e}"),
        ("largest error of lse", f"{accuracy.lse:.1e}", f"{bounds.MAX_LSE:.0e}"),
    ]


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return " x ".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
