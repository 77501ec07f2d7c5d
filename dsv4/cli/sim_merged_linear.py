"""`dsv4 sim merged_linear`: products of one input with several weights, in every tiling."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

FEW_SMS = 4  # two clusters or fewer of each kind, which have several tiles: rings wrap
# Ragged rows, both dtypes of outputs in each kind.
WEIGHTS = (
    "136 float8_e8m0fnu bfloat16, 8 float8_e8m0fnu float32, 72 bfloat16 float32, "
    "64 bfloat16 bfloat16"
)
SIZES = (
    Size("tokens", 67, "T"),
    Size("width", 512, "K, input features, a multiple of 512"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        kernels,
        "merged_linear",
        "several weights of one input, every tiling",
        "Compile the kernels, simulate each tiling, compare one with exact sums and all others "
        "with it, bit for bit; the input as it is, and with its FP8 codes.",
        SIZES,
        run,
        has_arch=True,
    )
    parser.add_argument(
        "--weights",
        default=WEIGHTS,
        metavar="LIST",
        help="features, type and output type of each, FP8 first (default: two of each)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.merged_linear import MERGED_LINEAR, PLANS
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.merged_linear import Case, Inputs, assert_merged_close

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(MERGED_LINEAR, launches.target)
    first = None
    with launches.checks():
        for has_codes in (False, True):
            case = Case(args.tokens, args.width, args.weights, has_codes=has_codes)
            inputs = Inputs.make(case, args.seed)
            compiled = kernels.compile(inputs.config)
            for index, tiling in enumerate(PLANS[args.arch].tilings(inputs.config)):
                schedule = SCHEDULES[index % len(SCHEDULES)]
                outcome = launches.run(
                    compiled,
                    lambda i=index, given=inputs: kernels.call(given, tiling=i, num_sms=FEW_SMS),
                    schedule,
                )
                if first is None:
                    assert_merged_close(outcome, inputs)
                    first = {name: outcome[name] for name in inputs.outputs}
                for name, tensor in first.items():
                    assert tensor.equal(outcome[name]), f"{name}: other bits in {tiling}"
                given = "codes of x" if has_codes else "x"
                print(
                    f"{args.arch}, {args.tokens} tokens of {args.width}, {given}, tiles of "
                    f"{tiling.tokens} tokens, {schedule}: equal bits, no race"
                )
    return launches.finish()
