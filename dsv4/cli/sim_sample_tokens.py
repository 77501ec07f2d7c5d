"""`dsv4 sim sample_tokens`: tokens drawn from logits, simulated and compared with torch."""

from __future__ import annotations

import argparse
from functools import partial

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

SIZES = (
    Size("rows", 5, "requests"),
    # Several CTAs of a row, several vectors of a thread.
    Size("vocabulary", 5000, "logits of a row, a multiple of 4"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "sample_tokens",
        "a token of each row of logits, with and without top_k, top_p and min_p",
        "Compile the kernels, simulate them in every schedule on rows of most kinds, and compare "
        "the tokens with those of the torch implementation.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.sample_tokens import SAMPLE_TOKENS
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.sample_tokens import Case, Inputs, expected

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(SAMPLE_TOKENS, launches.target)
    with launches.checks():
        for truncates in (False, True):
            inputs = Inputs.make(Case(args.rows, 1, args.vocabulary, truncates), args.seed)
            compiled, wanted = kernels.compile(inputs.config), expected(inputs)
            way = "top_k, top_p, min_p" if truncates else "temperature alone"
            for schedule in SCHEDULES:
                outcome = launches.run(compiled, partial(kernels.call, inputs), schedule)
                assert outcome["tokens"].equal(wanted), f"tokens: not torch's ({way}, {schedule})"
                print(
                    f"{args.arch}, {args.rows} rows of {args.vocabulary} logits, {way}, "
                    f"{schedule}: the same tokens, no race"
                )
    return launches.finish()
