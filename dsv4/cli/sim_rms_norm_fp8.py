"""`dsv4 sim rms_norm_fp8`: RMSNorm with FP8 output, simulated and compared bit for bit."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

ONE_CTA = 1  # takes every block of rows
SIZES = (Size("tokens", 11, "rows"), Size("dim", 640, "of a row"))


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "rms_norm_fp8",
        "RMSNorm with FP8 codes and scales, in every schedule",
        "Compile the kernel, simulate it in every schedule with and without its optional output, "
        "and compare codes, scales and normalised rows with the torch implementation, bit for bit.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.rms_norm_fp8 import RMS_NORM_FP8
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.rms_norm_fp8 import Case, Inputs, assert_same_codes

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(RMS_NORM_FP8, launches.target)
    compiled = kernels.compile(Case(args.tokens, args.dim).config)
    with launches.checks():
        for wants_norm in (True, False):
            inputs = Inputs.make(Case(args.tokens, args.dim, wants_norm=wants_norm), args.seed)
            for schedule in SCHEDULES:
                outcome = launches.run(
                    compiled, lambda given=inputs: kernels.call(given, num_ctas=ONE_CTA), schedule
                )
                for name, tensor in inputs.expected().items():
                    assert_same_codes(name, outcome[name], tensor)
                (launch,) = outcome.report.launches
                rows = "with" if wants_norm else "without"
                print(
                    f"{args.arch}, {args.tokens} x {args.dim}, {rows} normalised rows, {schedule}: "
                    f"equal bits, no race, coverage {launch.coverage}"
                )
    return launches.finish()
