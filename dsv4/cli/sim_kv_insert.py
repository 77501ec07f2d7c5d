"""`dsv4 sim kv_insert`: latents written to pages of a cache, simulated in every schedule."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

FORMATS = ("fp8", "bf16")
FEW_CTAS = 2  # each takes several latents
SIZES = (Size("tokens", 11, "latents"),)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "kv_insert",
        "latents to pages of a cache, both formats, in every schedule",
        "Compile the kernel of each format of pages, simulate it, and compare the pages with those "
        "of the torch implementation, byte for byte.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.kv_insert import KV_INSERT
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.kv_insert import Case, Inputs, assert_same_pool, frame_of

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(KV_INSERT, launches.target)
    with launches.checks():
        for kv_format in FORMATS:
            inputs = Inputs.make(Case(args.tokens, kv_format=kv_format), args.seed)
            compiled = kernels.compile(inputs.config)
            for schedule in SCHEDULES:
                pool = {}

                def call(given=inputs, pool=pool):
                    pool["pool"] = given.pool()
                    return given.call(kernels.planned_for, pool, num_ctas=FEW_CTAS)

                outcome = launches.run(compiled, call, schedule)
                assert_same_pool(frame_of(pool["pool"]), inputs)
                (launch,) = outcome.report.launches
                print(
                    f"{args.arch}, {args.tokens} latents to pages of {kv_format}, {schedule}: "
                    f"equal bytes, no race, coverage {launch.coverage}"
                )
    return launches.finish()
