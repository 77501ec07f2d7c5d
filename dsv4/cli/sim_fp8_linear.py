"""`dsv4 sim fp8_linear`: the linear with FP8 weights, simulated in every tiling and compared."""

from __future__ import annotations

import argparse
import sys

from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED

ARCH = "sm_90a"
ONE_SM = 1  # its CTAs take every tile


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "fp8_linear",
        help="linear with FP8 weights, every tiling in every schedule",
        description="Compile the kernels, simulate each tiling in every schedule, compare one "
        "with exact sums of the quantised input and all others with it, bit for bit. Exit status 1 "
        "when they differ or a kernel is racy, 2 when synchronisation was not reached.",
    )
    for name, default, meaning in (
        ("tokens", 11, "T"),
        ("rows", 392, "M, output features"),
        ("width", 1024, "K, input features, a multiple of 512"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} ({default})"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    if args.tokens < 1:
        raise ValueError(f"--tokens: got {args.tokens}, needs at least 1")
    from dsv4.kernels.gemm.plan import tilings
    from dsv4.ops.fp8_linear import FP8_LINEAR
    from dsv4.simulator import Deadlock, KernelFault
    from dsv4.testing.fp8_linear import Case, Inputs, assert_linear_close
    from dsv4.testing.harness import SCHEDULES, Simulator, missed_synchronisation
    from dsv4.testing.kernel_call import OpKernels

    target = Simulator(ARCH, has_lines=True)
    inputs = Inputs.make(Case(args.tokens, args.width, args.rows), args.seed)
    kernels = OpKernels(FP8_LINEAR, target)
    compiled = kernels.compile(inputs.config)
    first, reports = None, []
    for index, tiling in enumerate(tilings(inputs.case.config)):
        for schedule in SCHEDULES:
            try:
                call = kernels.call(inputs, tiling=index, num_sms=ONE_SM)
                outcome = target.run(compiled, call, schedule, args.seed)
                if first is None:
                    assert_linear_close(outcome["out"], inputs)
                    first = outcome
                first.assert_same_bits(outcome, f"{tiling}, {schedule}")
            except (AssertionError, KernelFault, Deadlock) as fault:
                print(f"dsv4 sim: {type(fault).__name__}: {fault}", file=sys.stderr)
                return CHECK_FAILED
            reports.append(outcome.report)
            way = "streamed" if tiling.is_streamed else "resident"
            print(
                f"{ARCH}, {args.tokens} tokens, {args.rows} x {args.width}, {way} tiles of "
                f"{tiling.tokens} tokens, CTAs a tile: {tiling.cluster}, {schedule}: "
                "equal bits, no race"
            )
    missed = missed_synchronisation(reports)
    for left, total in missed.values():
        print(f"synchronisation never reached: {left} of {total}")
    return NOT_COVERED if missed else 0
