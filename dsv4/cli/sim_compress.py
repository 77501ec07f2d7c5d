"""`dsv4 sim compress`: steps of every kind of compressor, simulated in every schedule."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

# The released models' compressors, by the fields of a case that differ from the first one's.
KINDS: dict[str, dict] = {
    "CSA": {},
    "CSA in bf16": {"kv_format": "bf16"},
    "HCA": {"ratio": 128, "overlap": False},
    "indexer": {"dim": 128, "is_index": True},
}
SIZES = (Size("chunk", 21, "tokens of a request, at most"),)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "compress",
        "a step of a compressor, every kind in every schedule",
        "Compile the kernel of each kind of compressor, simulate a step of requests that are at "
        "their start, in the middle of a block and at its end, and compare state and pages with "
        "those of the torch implementation.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.compress import COMPRESS
    from dsv4.testing.compress import Case, Inputs, assert_step
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.kernel_call import OpKernels

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(COMPRESS, launches.target)
    chunk = args.chunk
    with launches.checks():
        for kind, fields in KINDS.items():
            ratio = fields.get("ratio", Case.ratio)
            # The last one is padding; of the others two end blocks that began before the step.
            starts = (2 * ratio - min(chunk, 3), 0, 5 * ratio - min(chunk, 2), 2)
            case = Case(starts, (chunk, chunk // 2, chunk - 1, -1), chunk, **fields)
            inputs = Inputs.make(case, args.seed)
            compiled = kernels.compile(inputs.config)
            for schedule in SCHEDULES:
                outcome = launches.run(compiled, lambda given=inputs: kernels.call(given), schedule)
                assert_step(inputs, outcome.scratch)
                print(
                    f"{args.arch}, {len(case.starts)} requests of up to {chunk} tokens, {kind}, "
                    f"{schedule}: the same state and entries, no race"
                )
    return launches.finish()
