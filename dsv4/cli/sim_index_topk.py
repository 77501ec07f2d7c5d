"""`dsv4 sim index_topk`: the choice of the indexer, simulated and compared with the oracle."""

from __future__ import annotations

import argparse

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

ARCH = "sm_90a"
FEW_CTAS = 2  # each with several lists, or parts of a long one
# Tokens that share a CTA, one that a CTA begins within, a list without an entry.
RAGGED = (70, 330, 5, 64, 0, 130, 65)
SIZES = (
    Size("topk", 64, "entries that are chosen"),
    # Registers of a CTA hold 16,384 scores.
    Size("longest", 33_000, "entries of the longest list"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "index_topk",
        "the indexer's choice of entries, ragged lists and long ones",
        "Compile the kernels, simulate them on lists of all lengths and on one that registers do "
        "not hold, by CTAs and by clusters, and compare the choice with the FP32 oracle's.",
        SIZES,
        run,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.indexer.plan import CLUSTER
    from dsv4.ops.index_topk import INDEX_TOPK
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.index_topk import Case, Inputs, assert_choice
    from dsv4.testing.kernel_call import OpKernels

    launches = CheckedLaunches(args, ARCH)
    kernels = OpKernels(INDEX_TOPK, launches.target)
    cases = {
        SCHEDULES: Case(RAGGED, topk=args.topk, gives_slots=True, padding_rows=1),
        SCHEDULES[:1]: Case((args.longest, 100), topk=args.topk),
    }
    with launches.checks():
        for schedules, case in cases.items():
            inputs = Inputs.make(case, args.seed)
            compiled = kernels.compile(inputs.config)
            for cluster in (1, CLUSTER):
                for schedule in schedules:
                    outcome = launches.run(
                        compiled,
                        lambda given=inputs, size=cluster: kernels.call(
                            given, num_ctas=FEW_CTAS, cluster=size
                        ),
                        schedule,
                    )
                    assert_choice(inputs, outcome.outputs)
                    print(
                        f"{ARCH}, {len(case.lens)} lists of up to "
                        f"{max(case.lens)} entries, clusters of {cluster}, {schedule}: "
                        "the same choice, no race"
                    )
    return launches.finish()
