"""`dsv4 sim latent_rows`: what follows a layer's projections, simulated in every schedule."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

FEW_CTAS = 1  # of a task of rows, which takes them in turns
SIZES = (Size("chunk", 13, "tokens of a request, at most"),)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "latent_rows",
        "norms, keys and compression of a step in one launch, layers of every kind",
        "Compile the kernel of each kind of layer, simulate a step of requests that are at their "
        "start, in the middle of a block and at its end, and compare codes, keys, entries and "
        "states with those of the torch implementations.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.latent_rows import LATENT_ROWS
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels
    from dsv4.testing.latent_rows import KINDS, Case, Inputs, assert_tasks

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(LATENT_ROWS, launches.target)
    chunk = args.chunk
    with launches.checks():
        for kind, fields in KINDS.items():
            ratio = fields.get("ratio") or Case.ratio
            # The last one is padding; of the others two end blocks that began before the step.
            starts = (2 * ratio - min(chunk, 3), 0, 5 * ratio - min(chunk, 2), 2)
            case = Case(starts, (chunk, chunk // 2, chunk - 1, -1), chunk, **fields)
            inputs = Inputs.make(case, args.seed)
            compiled = kernels.compile(inputs.config)
            for schedule in SCHEDULES:

                def call(given=inputs):
                    return kernels.call(given, num_ctas=FEW_CTAS)

                outcome = launches.run(compiled, call, schedule)
                assert_tasks(inputs, {**outcome.outputs, **outcome.scratch})
                print(
                    f"{args.arch}, {len(starts)} requests of up to {chunk} tokens, a layer of "
                    f"{kind}, {schedule}: the same codes, keys, entries and states, no race"
                )
    return launches.finish()
