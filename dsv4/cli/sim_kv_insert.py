"""`dsv4 sim kv_insert`: latents written to pages of a cache, simulated in every schedule."""

from __future__ import annotations

import argparse
import sys

from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED

ARCHITECTURES = ("sm_100a", "sm_90a")
FORMATS = ("fp8", "bf16")
FEW_CTAS = 2  # each takes several latents


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "kv_insert",
        help="latents to pages of a cache, both formats, in every schedule",
        description="Compile the kernel of each format of pages, simulate it, and compare the "
        "pages with those of the torch implementation, byte for byte. Exit status 1 when they "
        "differ or the kernel is racy, 2 when synchronisation was not reached.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--tokens", type=int, default=11, metavar="N", help="latents (default: 11)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    if args.tokens < 1:
        raise ValueError(f"--tokens: got {args.tokens}, needs at least 1")
    from dsv4.ops.kv_insert import KV_INSERT
    from dsv4.simulator import Deadlock, KernelFault
    from dsv4.testing.harness import SCHEDULES, Simulator, missed_synchronisation
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.kv_insert import Case, Inputs, assert_same_pool, frame_of

    target, reports = Simulator(args.arch, has_lines=True), []
    kernels = OpKernels(KV_INSERT, target)
    for kv_format in FORMATS:
        inputs = Inputs.make(Case(args.tokens, kv_format=kv_format), args.seed)
        compiled = kernels.compile(inputs.config)
        for schedule in SCHEDULES:
            pool = inputs.pool()
            call = inputs.call(kernels.planned_for, {"pool": pool}, num_ctas=FEW_CTAS)
            try:
                outcome = target.run(compiled, call, schedule, args.seed)
                assert_same_pool(frame_of(pool), inputs)
            except (AssertionError, KernelFault, Deadlock) as fault:
                print(f"dsv4 sim: {type(fault).__name__}: {fault}", file=sys.stderr)
                return CHECK_FAILED
            reports.append(outcome.report)
            (launch,) = outcome.report.launches
            print(
                f"{args.arch}, {args.tokens} latents to pages of {kv_format}, {schedule}: equal "
                f"bytes, no race, coverage {launch.coverage}"
            )
    missed = missed_synchronisation(reports)
    for left, total in missed.values():
        print(f"synchronisation never reached: {left} of {total}")
    return NOT_COVERED if missed else 0
