"""Reports of the commands of `dsv4 sim`: text, JSON, SARIF, a page, and the exit status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv4.cli.output_file import output_file
from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.simulator.html import Modelled
    from dsv4.simulator.merged import MergedReport

NO_COMPILER = (
    "the kernel compiler is missing (it exists for Linux only): "
    "pip install 'nvidia-cutlass-dsl>=4.8,<4.9' apache-tvm-ffi"
)
SHOWN_PLACES = 10  # of synchronisation that was not reached, by kernel


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` and `ptx` have in common."""
    parser.add_argument(
        "--schedules",
        default="eager",
        metavar="LIST",
        help="when asynchronous work completes: some of eager,lazy,random, or all "
        "(default: eager); with several, results must have the same bits",
    )
    parser.add_argument(
        "--races",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check happens-before of every access (default: yes)",
    )
    add_reports(parser)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Declare the files that `finish` writes."""
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the findings as JSON"
    )
    add_sarif(parser)
    add_html(parser)


def add_sarif(parser: argparse.ArgumentParser) -> None:
    """Declare the file of annotations."""
    parser.add_argument(
        "--sarif",
        type=output_file,
        metavar="FILE",
        help="write the findings as SARIF, for code review",
    )


def add_html(parser: argparse.ArgumentParser) -> None:
    """Declare the page of findings, coverage and timeline."""
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="write a page: source with findings and coverage in its margin, modelled timeline",
    )


def schedules_of(text: str) -> tuple[str, ...]:
    """The schedules that `--schedules` names; ValueError for others."""
    known = ("eager", "lazy", "random")
    chosen = known if text == "all" else tuple(text.split(","))
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"--schedules: got {quoted(name)}, needs some of {', '.join(known)}, or all"
            )
    return chosen


def finish(
    report: MergedReport, args: argparse.Namespace, modelled: Sequence[Modelled] = ()
) -> int:
    """Print and write what was found; the exit status of the command."""
    from dsv4.simulator.formats import as_json, as_sarif
    from dsv4.simulator.html import as_html

    if args.html is not None:
        args.html.write_text(as_html(report, modelled))

    for path, make in ((args.json, as_json), (args.sarif, as_sarif)):
        if path is not None:
            path.write_text(json.dumps(make(report), indent=2) + "\n")
    for finding in report.findings:
        print(finding)
    for warning in report.warnings:
        print(f"warning: {warning}")
    for kernel, places in report.uncovered.items():
        print(f"synchronisation never reached in {kernel}: {len(places)}")
        for place in places[:SHOWN_PLACES]:
            print(f"    {place}")
        if len(places) > SHOWN_PLACES:
            print(f"    and {len(places) - SHOWN_PLACES} more (--json lists all)")
    instructions = sum(launch.instructions for launch in report.launches)
    races = f"{len(report.findings)} findings" if args.races else "races not checked"
    print(f"{len(report.launches)} launches, {instructions:,} warp instructions, {races}")
    if report.findings:
        return CHECK_FAILED
    return NOT_COVERED if args.races and report.uncovered else 0
