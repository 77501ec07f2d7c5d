"""`dsv4 sim moe`: a mixture-of-experts layer, simulated in every tiling and compared."""

from __future__ import annotations

import argparse
import sys

from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED

ARCH = "sm_90a"
FEW_SMS = 2  # whose CTAs take all tiles


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "moe",
        help="mixture-of-experts layer, every tiling",
        description="Compile the kernels, simulate router and experts with each tiling, compare "
        "each launch with exact sums of what it was given, and all tilings bit for bit. Exit "
        "status 1 when they differ or a kernel is racy, 2 when synchronisation was not reached; "
        "few tokens do not reach all of the sort.",
    )
    for name, default, meaning in (
        ("tokens", 19, "T"),
        ("hidden", 512, "D, a multiple of 512"),
        ("inner", 128, "I, a multiple of 128"),
        ("experts", 32, "E, a multiple of 32"),
        ("top-k", 3, "experts of a token"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} ({default})"
        )
    parser.add_argument(
        "--experts-in", choices=("fp4", "fp8"), default="fp4", help="format of weights (fp4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    if args.tokens < 1:
        raise ValueError(f"--tokens: got {args.tokens}, needs at least 1")
    from dsv4.kernels.moe.plan import tilings
    from dsv4.ops.moe.op import MOE
    from dsv4.ops.runtime.backend import Device
    from dsv4.simulator import Deadlock, KernelFault
    from dsv4.testing.harness import SCHEDULES, Simulator, missed_synchronisation
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.moe import Case
    from dsv4.testing.moe_layer import LayerInputs, assert_layer_close

    sizes = (args.tokens, args.hidden, args.inner, args.experts, args.top_k)
    inputs = LayerInputs.make(Case(*sizes, args.experts_in), args.seed)
    config = inputs.config
    if config.why_no_kernel:
        raise ValueError(f"no kernel: {config.why_no_kernel}")
    target = Simulator(ARCH, has_lines=True)
    compiled = OpKernels(MOE, target).compile(config)
    device = Device(ARCH, FEW_SMS)
    first, reports = None, []
    for index, tiling in enumerate(tilings(config.kernels)):
        schedule = SCHEDULES[index % len(SCHEDULES)]
        try:
            outcome = target.run(compiled, inputs.call_tiled(index, device), schedule, args.seed)
            assert_layer_close(outcome, inputs)
            if first is None:
                first = outcome["out"]
            assert first.equal(outcome["out"]), f"out: other bits in {tiling}"
        except (AssertionError, KernelFault, Deadlock) as fault:
            print(f"dsv4 sim: {type(fault).__name__}: {fault}", file=sys.stderr)
            return CHECK_FAILED
        reports.append(outcome.report)
        print(
            f"{ARCH}, {args.tokens} tokens, {args.experts} experts {args.hidden} x {args.inner} in "
            f"{args.experts_in}, tiles of {tiling.tokens} tokens, {schedule}: close, no race"
        )
    missed = missed_synchronisation(reports)
    for name, (left, total) in missed.items():
        print(f"synchronisation never reached in {name[:60]}: {left} of {total}")
    return NOT_COVERED if missed else 0
