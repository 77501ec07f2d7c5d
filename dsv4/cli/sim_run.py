"""`dsv4 sim run`: any unmodified CuTeDSL script, its launches simulated and checked."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback

from dsv4.cli import sim_output
from dsv4.cli.arguments import input_path
from dsv4.cli.sim_status import CHECK_FAILED

ARCHITECTURES = ("sm_100a", "sm_90a")


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "run",
        help="an unmodified CuTeDSL script, without its GPU",
        description="Run a Python script whose CUDA tensors stay on the CPU and whose CuTeDSL "
        "launches are simulated. Exit status 1 for a finding, a fault, or an error of the script; "
        "2 where its inputs leave synchronisation unchecked. Options come before the script.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    sim_output.add_options(parser)
    parser.add_argument("script", type=input_path, metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the script and report on all that it launched."""
    schedules = sim_output.schedules_of(args.schedules)
    if not args.script.is_file():
        raise ValueError(f"SCRIPT: no file {args.script}")
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError(sim_output.NO_COMPILER)
    from dsv4.simulator import SimulatorError
    from dsv4.simulator.formats import finding_of
    from dsv4.simulator.frontend.script import Launcher, run_script

    launcher = Launcher(schedules, args.races, models=args.html is not None)
    failed = False
    try:
        run_script(args.script, args.arguments, args.arch, launcher)
    except SimulatorError as error:
        launcher.report.findings.append(finding_of(error))
    except (Exception, SystemExit):
        traceback.print_exc()
        failed = True
    sys.stdout.flush()
    if not launcher.report.launches and not launcher.report.findings and not failed:
        raise RuntimeError(f"{args.script} launched no kernel")
    status = sim_output.finish(launcher.report, args, launcher.modelled)
    return status or (CHECK_FAILED if failed else 0)
