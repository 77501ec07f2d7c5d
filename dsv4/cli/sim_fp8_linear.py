"""`dsv4 sim fp8_linear`: the linear with FP8 weights, simulated in every tiling and compared."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

ONE_SM = 1  # its CTAs take every tile
SIZES = (
    Size("tokens", 11, "T"),
    Size("rows", 392, "M, output features"),
    Size("width", 1024, "K, input features, a multiple of 512"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "fp8_linear",
        "linear with FP8 weights, every tiling in every schedule",
        "Compile the kernels, simulate each tiling in every schedule, compare one with exact sums "
        "of the quantised input and all others with it, bit for bit.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.fp8_linear import FP8_LINEAR, PLANS
    from dsv4.testing.fp8_linear import Case, Inputs, assert_linear_close
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels

    launches = CheckedLaunches(args, args.arch)
    inputs = Inputs.make(Case(args.tokens, args.width, args.rows), args.seed)
    kernels = OpKernels(FP8_LINEAR, launches.target)
    compiled = kernels.compile(inputs.config)
    first = None
    with launches.checks():
        for index, tiling in enumerate(PLANS[args.arch].tilings(inputs.case.config)):
            for schedule in SCHEDULES:
                outcome = launches.run(
                    compiled,
                    lambda i=index: kernels.call(inputs, tiling=i, num_sms=ONE_SM),
                    schedule,
                )
                if first is None:
                    assert_linear_close(outcome["out"], inputs)
                    first = outcome
                first.assert_same_bits(outcome, f"{tiling}, {schedule}")
                way = "streamed" if tiling.is_streamed else "quantised"
                print(
                    f"{args.arch}, {args.tokens} tokens, {args.rows} x {args.width}, {way} tiles "
                    f"of {tiling.tokens} tokens, CTAs a tile: {tiling.cluster}, {schedule}: "
                    "equal bits, no race"
                )
    return launches.finish()
