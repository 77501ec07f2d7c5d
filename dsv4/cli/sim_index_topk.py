"""`dsv4 sim index_topk`: the choice of the indexer, simulated and compared with the oracle."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

FEW_CTAS = 2  # each with several lists, or parts of a long one
# Tokens that share a CTA, one that a CTA begins within, a list without an entry.
RAGGED = (70, 330, 5, 64, 0, 130, 65)
SIZES = (Size("topk", 64, "entries that are chosen"),)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    add_command(
        kernels,
        "index_topk",
        "the indexer's choice of entries, ragged lists and long ones",
        "Compile the kernels, simulate them on lists of all lengths and on one that fills a "
        "launch, by CTAs and by clusters, and compare the choice with the FP32 oracle's.",
        SIZES,
        run,
        has_arch=True,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.indexer.config import RANKS
    from dsv4.kernels.indexer.plan import clusters_of
    from dsv4.ops.index_topk import INDEX_TOPK
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.index_topk import Case, Inputs, assert_choice, longest
    from dsv4.testing.kernel_call import OpKernels

    launches = CheckedLaunches(args, args.arch)
    kernels = OpKernels(INDEX_TOPK, launches.target)
    ragged = Case(RAGGED, topk=args.topk, gives_slots=True, padding_rows=1)
    sizes = [
        (rank, ctas, cluster)
        for rank in RANKS
        for ctas, clusters in zip((0, FEW_CTAS), clusters_of(rank))
        for cluster in clusters
    ]
    with launches.checks():
        for rank, ctas, cluster in sizes:
            compiled = kernels.compile(replace(ragged, rank=rank).config)
            filling = replace(longest(ctas, cluster), topk=args.topk)
            for some, schedules in ((ragged, SCHEDULES), (filling, SCHEDULES[:1])):
                case = replace(some, rank=rank)
                inputs = Inputs.make(case, args.seed)
                for schedule in schedules:
                    outcome = launches.run(
                        compiled,
                        lambda given=inputs, ctas=ctas, size=cluster: kernels.call(
                            given, num_ctas=ctas, cluster=size
                        ),
                        schedule,
                    )
                    assert_choice(inputs, outcome.outputs)
                    print(
                        f"{args.arch}, {len(case.lens)} lists of up to {max(case.lens)} entries, "
                        f"scores in {rank}, "
                        f"{'two launches' if ctas else 'one launch'}, clusters of {cluster}, "
                        f"{schedule}: the same choice, no race"
                    )
    return launches.finish()
