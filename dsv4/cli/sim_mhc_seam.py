"""`dsv4 sim mhc_seam`: what lies between two sublayers, simulated in every schedule."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

ONE_CLUSTER = 1  # takes every token
SIZES = (
    Size("tokens", 11, "T"),
    Size("dim", 384, "elements of a stream, a multiple of 128"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "mhc_seam",
        "mHC post, pre, norm and FP8 codes, every pass in every schedule",
        "Compile the kernels, simulate each number of tokens a pass and the two launches for many "
        "tokens, in every schedule, with and without FP8 codes and as the model's head, and "
        "compare with the FP32 oracle.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.seam.config import can_join, has_kernel, tiling_of
    from dsv4.ops.mhc_seam import MHC_SEAM
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.mhc_seam import Case, Inputs, assert_seam_close

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(MHC_SEAM, launches.target)
    sizes = (args.tokens, args.dim)
    cases = {
        "seam": Case(*sizes),
        "seam without codes": Case(*sizes, quantizes=False),
        "head": Case(*sizes, is_head=True, expands=False, quantizes=False),
    }
    if not has_kernel(cases["seam"].config):
        raise ValueError(f"--dim: got {args.dim}, needs a multiple of 128 that a cluster can hold")
    with launches.checks():
        for name, case in cases.items():
            inputs = Inputs.make(case, args.seed)
            compiled = kernels.compile(inputs.config)
            tiling = tiling_of(inputs.config)
            ways = [(f"{size} a pass", (size, 0, 0)) for size in tiling.pass_sizes]
            ways.append(("two launches", (1, 1, 0)))
            if can_join(tiling):
                ways.append(("one launch of parts", (1, 1, 1)))
            for index, (way, sizes_) in enumerate(ways):
                schedule = SCHEDULES[index % len(SCHEDULES)]
                scalars = {"num_clusters": ONE_CLUSTER}
                scalars |= dict(zip(("pass_tokens", "parts", "is_joined"), sizes_))
                outcome = launches.run(
                    compiled,
                    lambda given=inputs, scalars=scalars: kernels.call(given, **scalars),
                    schedule,
                )
                assert_seam_close(inputs, outcome.outputs)
                print(
                    f"{args.arch}, {args.tokens} tokens of 4 x {args.dim}, {name}, {way}, "
                    f"{schedule}: close, no race"
                )
    return launches.finish()
