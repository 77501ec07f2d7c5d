"""`dsv4 sim step_indices`: what layers derive from a step's requests, simulated and compared."""

from __future__ import annotations

import argparse
from functools import partial

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

SIZES = (
    Size("rows", 37, "requests"),
    Size("chunk", 2, "tokens of a request, at most"),
    Size("blocks", 40, "of the block table"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "step_indices",
        "numbers that a step's layers share",
        "Compile the kernel, simulate it in every schedule on requests around ends of entries, "
        "blocks and the table, and compare all numbers with the torch implementation's.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.step_indices import STEP_INDICES
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.step_indices import Case, Inputs, expected

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(STEP_INDICES, launches.target)
    inputs = Inputs.make(Case(args.rows, args.chunk, args.blocks), args.seed)
    compiled, wanted = kernels.compile(inputs.config), expected(inputs)
    with launches.checks():
        for schedule in SCHEDULES:
            outcome = launches.run(compiled, partial(kernels.call, inputs), schedule)
            for name, tensor in wanted.items():
                assert outcome.outputs[name].equal(tensor), f"{name}: not torch's ({schedule})"
            print(
                f"{args.arch}, {args.rows} requests of up to {args.chunk} tokens, {schedule}: the "
                "same numbers, no race"
            )
    return launches.finish()
