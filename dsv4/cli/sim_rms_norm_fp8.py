"""`dsv4 sim rms_norm_fp8`: RMSNorm with FP8 output, simulated and compared bit for bit."""

from __future__ import annotations

import argparse
import sys

from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED

ARCHITECTURES = ("sm_100a", "sm_90a")
ONE_CTA = 1  # takes every block of rows


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "rms_norm_fp8",
        help="RMSNorm with FP8 codes and scales, in every schedule",
        description="Compile the kernel, simulate it in every schedule with and without its "
        "optional output, and compare codes, scales and normalised rows with the torch "
        "implementation, bit for bit. Exit status 1 when they differ or the kernel is racy, 2 when "
        "synchronisation was not reached.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--tokens", type=int, default=11, metavar="N", help="rows (default: 11)")
    parser.add_argument("--dim", type=int, default=640, metavar="N", help="of a row (default: 640)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    if args.tokens < 1:
        raise ValueError(f"--tokens: got {args.tokens}, needs at least 1")
    from dsv4.ops.rms_norm_fp8 import RMS_NORM_FP8
    from dsv4.simulator import Deadlock, KernelFault
    from dsv4.testing.harness import SCHEDULES, Simulator, missed_synchronisation
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.rms_norm_fp8 import Case, Inputs, assert_same_codes

    target = Simulator(args.arch, has_lines=True)
    kernels = OpKernels(RMS_NORM_FP8, target)
    compiled = kernels.compile(Case(args.tokens, args.dim).config)
    reports = []
    for wants_norm in (True, False):
        inputs = Inputs.make(Case(args.tokens, args.dim, wants_norm=wants_norm), args.seed)
        for schedule in SCHEDULES:
            try:
                call = kernels.call(inputs, num_ctas=ONE_CTA)
                outcome = target.run(compiled, call, schedule, args.seed)
                for name, tensor in inputs.expected().items():
                    assert_same_codes(name, outcome[name], tensor)
            except (AssertionError, KernelFault, Deadlock) as fault:
                print(f"dsv4 sim: {type(fault).__name__}: {fault}", file=sys.stderr)
                return CHECK_FAILED
            reports.append(outcome.report)
            (launch,) = outcome.report.launches
            rows = "with" if wants_norm else "without"
            print(
                f"{args.arch}, {args.tokens} x {args.dim}, {rows} normalised rows, {schedule}: "
                f"equal bits, no race, coverage {launch.coverage}"
            )
    missed = missed_synchronisation(reports)
    for left, total in missed.values():
        print(f"synchronisation never reached: {left} of {total}")
    return NOT_COVERED if missed else 0
