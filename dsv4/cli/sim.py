"""`dsv4 sim`: run the GPU kernels on this CPU, instruction by instruction, and check them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from dsv4.cli import (
    sim_compress,
    sim_fp8_linear,
    sim_index_topk,
    sim_kv_insert,
    sim_latent_rows,
    sim_linears,
    sim_loads,
    sim_lowp,
    sim_merged_linear,
    sim_mhc_seam,
    sim_moe,
    sim_output,
    sim_paged,
    sim_ptx,
    sim_rms_norm_fp8,
    sim_run,
    sim_sample_tokens,
    sim_step_indices,
)
from dsv4.cli.arguments import input_path
from dsv4.cli.output_file import output_file
from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED

if TYPE_CHECKING:
    from dsv4.cli.sim_attention import CompiledKernel, Verdict, Workload
    from dsv4.simulator import Report
    from dsv4.simulator.report import Finding, LaunchReport
    from dsv4.simulator.timing import LaunchPrediction, Prediction

# Kept here as well as in the simulator, which would import torch: `--help` must be instant.
ARCHITECTURES = ("sm_100a", "sm_90a")
SCHEDULES = ("eager", "lazy", "random")
INPUTS = ("decode", "mixed")
HEAD_DIMS = (64, 128, 256, 512)
SHOWN_FINDINGS = 5


class Outcome(NamedTuple):
    """All that one run found.

    Attributes:
        report: of the last launch, whose coverage is that of all, with the findings of all.
        checked: whether races were looked for.
        missed: how much synchronisation of which kernel never ran.
    """

    workload: Workload
    compiled: CompiledKernel
    report: Report
    verdict: Verdict
    prediction: Prediction
    checked: bool
    missed: list[str]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare `dsv4 sim`."""
    parser = subparsers.add_parser(
        "sim", help="run a kernel in the GPU simulator, no GPU needed", description=__doc__
    )
    # Without a kernel: which there are.
    parser.set_defaults(run=_list_kernels)
    kernels = parser.add_subparsers(dest="kernel", metavar="KERNEL")
    attention = kernels.add_parser(
        "attention",
        help="one decode step of sparse_fmha_with_swa",
        description="Compile the attention kernel, simulate one decode step on random inputs, and "
        "compare the result with the FP32 oracle. Exit status 1 when it is wrong or racy, 2 when "
        "these inputs leave synchronisation unchecked, which `--inputs mixed` does not.",
    )
    _add_shape(attention)
    attention.add_argument(
        "--inputs",
        choices=INPUTS,
        default=INPUTS[0],
        help="one decode step, or mixed requests that reach every synchronisation",
    )
    attention.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="eager",
        help="when asynchronous work completes (default: at issue)",
    )
    attention.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    attention.add_argument("--no-races", action="store_true", help="no race check: faster")
    attention.add_argument("--json", action="store_true", help="print JSON instead of tables")
    sim_output.add_sarif(attention)
    sim_output.add_html(attention)
    attention.add_argument(
        "--timeline",
        type=output_file,
        metavar="FILE",
        help="write the modelled timeline for Perfetto",
    )
    attention.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw it (PNG; needs the bench extra)"
    )
    attention.add_argument(
        "--model-table",
        action="store_true",
        help="only model the time of Pro and Flash at several numbers of tokens (about a minute)",
    )
    attention.add_argument(
        "--measured",
        type=input_path,
        metavar="FILE",
        help="for --model-table: the shapes and times of `dsv4 bench attention --json FILE`",
    )
    attention.set_defaults(run=run)
    sim_rms_norm_fp8.add_parser(kernels)
    sim_fp8_linear.add_parser(kernels)
    sim_merged_linear.add_parser(kernels)
    sim_linears.add_parser(kernels)
    sim_index_topk.add_parser(kernels)
    sim_compress.add_parser(kernels)
    sim_lowp.add_parser(kernels)
    sim_mhc_seam.add_parser(kernels)
    sim_moe.add_parser(kernels)
    sim_paged.add_parser(kernels)
    sim_kv_insert.add_parser(kernels)
    sim_latent_rows.add_parser(kernels)
    sim_step_indices.add_parser(kernels)
    sim_sample_tokens.add_parser(kernels)
    sim_run.add_parser(kernels)
    sim_ptx.add_parser(kernels)
    sim_loads.add_parser(kernels)


def _list_kernels(args: argparse.Namespace) -> int:
    from dsv4.cli.sim_kernels import print_kernels

    print_kernels()
    return 0


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
    from dsv4.cli import sim_attention, sim_table
    from dsv4.simulator import Deadlock, KernelFault
    from dsv4.simulator.timing import predict
    from dsv4.testing.harness import Simulator, missed_synchronisation

    if args.model_table:
        sim_table.print_table(args.arch, args.measured)
        return 0
    compiled = sim_attention.compile_attention(workload)
    inputs = workload.inputs(args.seed)
    target = Simulator(workload.arch)
    options = (args.schedule, args.seed, not args.no_races)
    reports, verdicts = [], []
    try:
        for launch in workload.launches:
            given = inputs.window_only() if launch.is_window_only else inputs
            call = workload.call(given, launch.splits, launch.ctas)
            reports.append(target.simulate(compiled.function, call, *options).report)
            verdicts.append(sim_attention.Verdict.of(call, given))
    except (KernelFault, Deadlock) as fault:
        # What the kernel did wrong, and where: as many lines as that takes.
        print(f"dsv4 sim: {type(fault).__name__}: {fault}", file=sys.stderr)
        return CHECK_FAILED
    report = _last_with_all_findings(reports)
    missed = [
        f"{left} of {total} in {compiled.name_of(entry)}"
        for entry, (left, total) in missed_synchronisation(reports).items()
    ]
    verdict = sim_attention.Verdict.worst(verdicts)
    sim_attention.let_others_arrive(workload, call)
    clusters = sim_attention.timed_clusters(workload)
    prediction = predict(compiled.function, *call.args, **call.options, choose=clusters)
    outcome = Outcome(workload, compiled, report, verdict, prediction, not args.no_races, missed)
    if args.json:
        print(json.dumps(_summary(outcome), indent=2))
    else:
        _print(outcome)
    _export(args, prediction)
    _write_reports(args, reports, prediction)
    if not verdict.correct or report.races:
        return CHECK_FAILED
    # Without a race check nothing is said about synchronisation, covered or not.
    return NOT_COVERED if outcome.checked and outcome.missed else 0


def _last_with_all_findings(reports: list[Report]) -> Report:
    """The last launches, whose coverage is that of all, with what was found in any."""
    last = reports[-1]
    last.races = _distinct(found for report in reports for found in report.races)
    last.warnings = _distinct(found for report in reports for found in report.warnings)
    return last


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    return list({(found.kind, found.places): found for found in findings}.values())


def _workload(args: argparse.Namespace) -> Workload:
    """The shape that the arguments describe; ValueError names the argument that is wrong."""
    if args.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"--head-dim: got {args.head_dim}, needs one of {', '.join(map(str, HEAD_DIMS))}"
        )
    for name in ("tokens", "heads"):
        value = getattr(args, name)
        if value < 1:
            raise ValueError(f"--{name}: got {value}, needs at least 1")
    for name in ("top_k", "window"):
        value = getattr(args, name)
        if value < 0:
            raise ValueError(f"--{name.replace('_', '-')}: got {value}, needs at least 0")
    if args.top_k + args.window == 0:
        raise ValueError("--top-k and --window: got 0 and 0, there is nothing to attend to")
    _check_outputs(args)
    if args.num_splits is not None and args.num_splits < 1:
        raise ValueError(f"--num-splits: got {args.num_splits}, needs at least 1")
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError(sim_output.NO_COMPILER)
    from dsv4.cli.sim_attention import Workload
    from dsv4.testing.attention import Case

    if args.inputs == "mixed":
        sizes = (args.heads, args.head_dim, args.top_k)
        return Workload.mixed(args.arch, *sizes, args.num_splits)
    sizes = (args.tokens, args.heads, args.top_k, args.window, args.head_dim)
    return Workload(args.arch, Case.decode(*sizes), args.num_splits)


def _export(args: argparse.Namespace, prediction: Prediction) -> None:
    """Write the timeline of the longest launch where the arguments ask for it."""
    from dsv4.simulator.timing import timeline

    if args.timeline is not None:
        timeline.write_perfetto(args.timeline, prediction.longest, prediction.machine)
    if args.plot is not None:
        timeline.write_plot(args.plot, prediction.longest, prediction.machine)


def _write_reports(args: argparse.Namespace, reports: list[Report], prediction: Prediction) -> None:
    """Write findings as SARIF; findings, coverage and the modelled launches as a page."""
    from dsv4.simulator.formats import as_sarif
    from dsv4.simulator.html import Modelled, as_html
    from dsv4.simulator.merged import MergedReport

    merged = MergedReport()
    for report in reports:
        merged.add(report)
    if args.sarif is not None:
        args.sarif.write_text(json.dumps(as_sarif(merged), indent=2) + "\n")
    if args.html is not None:
        launches = [Modelled(prediction.machine, launch) for launch in prediction.launches]
        args.html.write_text(as_html(merged, launches))


def _check_outputs(args: argparse.Namespace) -> None:
    """Outputs that would be lost are an error before the simulation runs."""
    if args.measured is not None and not args.model_table:
        raise ValueError("--measured: needs --model-table")
    files = (args.timeline, args.plot, args.sarif, args.html)
    if args.model_table and (args.json or any(files)):
        raise ValueError(
            "--model-table: prints a table alone, no --json, --timeline, --plot, --sarif or --html"
        )
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'dsv4[bench]'")


def _kernel_row(
    compiled: CompiledKernel, launch: LaunchReport, modelled: LaunchPrediction
) -> dict[str, object]:
    """What is known about one launch; None where the compiler said nothing."""
    said = compiled.report_of(launch.kernel)
    return {
        "kernel": compiled.name_of(launch.kernel),
        "grid": list(launch.grid),
        "threads": launch.block[0] * launch.block[1] * launch.block[2],
        "registers": said.registers if said else None,
        "spill_bytes": said.spill_stores + said.spill_loads if said else None,
        "shared_memory": launch.shared_bytes,
        "tmem_columns": compiled.tmem_columns if launch.operations.get("tcgen05.mma") else 0,
        "coverage": str(launch.coverage),
        "warp_instructions": launch.instructions,
        "warp_instructions_per_second": round(launch.instructions_per_second),
        "model_microseconds": round(modelled.microseconds, 2),
        "model_cycles": round(modelled.cycles),
        "model_busiest_unit": modelled.bound,
    }


def _kernel_rows(outcome: Outcome) -> list[dict[str, object]]:
    launches = zip(outcome.report.launches, outcome.prediction.launches)
    return [_kernel_row(outcome.compiled, launch, modelled) for launch, modelled in launches]


def _summary(outcome: Outcome) -> dict[str, object]:
    """Everything the tables say, for machines; `races` is null where none were looked for."""
    verdict, report = outcome.verdict, outcome.report
    longest = outcome.prediction.longest
    return {
        "workload": str(outcome.workload),
        "correct": verdict.correct,
        "relative_error": verdict.o.relative,
        "cosine": verdict.o.cosine,
        "largest_element_error": verdict.o.element,
        "lse_error": verdict.lse,
        "races": [str(finding) for finding in report.races] if outcome.checked else None,
        "warnings": [str(finding) for finding in report.warnings] if outcome.checked else None,
        "synchronisation_never_reached": outcome.missed,
        "kernels": _kernel_rows(outcome),
        "model": outcome.prediction.machine.name,
        "model_microseconds": outcome.prediction.microseconds,
        "model_rests_on": outcome.prediction.machine.assumed,
        "model_busy_cycles": {name: round(cycles) for name, cycles in longest.busy.items()},
    }


def _print(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    from dsv4.simulator.timing import timeline

    console = Console()
    console.print(f"[bold]{outcome.workload}[/bold], simulated on this CPU")
    kernels = _kernel_rows(outcome)
    table = Table("", *[str(row["kernel"]) for row in kernels])
    for name in kernels[0]:
        if name != "kernel":
            table.add_row(name.replace("_", " "), *[_text(row[name]) for row in kernels])
    console.print(table)
    checks = Table("check", "result", "bound")
    for line in _check_rows(outcome.verdict):
        checks.add_row(*line)
    races = str(len(outcome.report.races)) if outcome.checked else "not checked"
    checks.add_row("races", races, "0")
    if outcome.checked:
        checks.add_row("warnings, tolerated", str(len(outcome.report.warnings)), "")
    checks.add_row("synchronisation never reached", "\n".join(outcome.missed) or "0", "0")
    console.print(checks)
    machine, time = outcome.prediction.machine.name, outcome.prediction.microseconds
    figures = outcome.prediction.machine.assumed
    console.print(f"{machine} model: {time:.1f} us for all launches, a prediction; {figures}")
    for line in timeline.text_lines(outcome.prediction.longest, outcome.prediction.machine):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    findings = [*outcome.report.races, *outcome.report.warnings]
    for finding in findings[:SHOWN_FINDINGS]:
        console.print(str(finding), markup=False, soft_wrap=True)
    if len(findings) > SHOWN_FINDINGS:
        console.print(f"... and {len(findings) - SHOWN_FINDINGS} more (--json lists all)")


def _check_rows(verdict: Verdict) -> list[tuple[str, str, str]]:
    from dsv4.testing.accuracy import BFLOAT16
    from dsv4.testing.attention import LSE_BOUND

    said = "[green]correct[/green]" if verdict.correct else "[red]WRONG[/red]"
    o = verdict.o
    return [
        ("output against the FP32 oracle", said, ""),
        ("relative error", f"{o.relative:.2e}", f"{BFLOAT16.relative:.0e}"),
        ("1 - cosine", f"{1 - o.cosine:.1e}", f"{1 - BFLOAT16.cosine:.0e}"),
        ("largest error of an element", f"{o.element:.1e}", f"{BFLOAT16.element:.0e}"),
        ("largest error of lse", f"{verdict.lse:.1e}", f"{LSE_BOUND:.0e}"),
    ]


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return " x ".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)
