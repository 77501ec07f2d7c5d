"""`dsv4 sim paged`: attention over pages of a cache, simulated in every schedule and compared."""

from __future__ import annotations

import argparse
import sys

from dsv4.cli.sim_status import CHECK_FAILED, NOT_COVERED

ARCH = "sm_90a"
FORMATS = ("bf16", "fp8")
SPLITS_AND_CTAS = ((1, 3), (3, 2))  # each CTA goes through several work items
RAGGED = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True}


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "paged",
        help="attention over pages of a cache, lists and tables, in every schedule",
        description="Compile the kernel, simulate sparse_fmha_paged on ragged requests with one "
        "and with several splits, and compare with the FP32 oracle. Exit status 1 when a result "
        "is wrong or the kernel is racy, 2 when synchronisation was not reached.",
    )
    for name, default, meaning in (
        ("heads", 8, "query heads"),
        ("head-dim", 512, "of a head"),
        ("entries", 200, "compressed entries of a token, at most"),
        ("window", 70, "keys of the window"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} ({default})"
        )
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of pages (bf16)")
    parser.add_argument("--form", choices=("list", "table", "mixed"), default="list")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.attention.paged_plan import workspace_size
    from dsv4.kernels.attention.sm90.paged import build
    from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
    from dsv4.simulator import Deadlock, KernelFault
    from dsv4.testing.harness import SCHEDULES, Simulator, missed_synchronisation
    from dsv4.testing.paged_attention import Case, assert_paged_close, make_inputs

    case = Case(
        3, 1, args.heads, args.head_dim, args.format, args.window, args.entries, 53, 61, args.form,
        wild=args.form == "list", **RAGGED,
    )  # fmt: skip
    target = Simulator(ARCH, has_lines=True)
    compiled = target.compile(build, SPARSE_FMHA_PAGED.compiled_config(case.config, ARCH))
    inputs, reports = make_inputs(case, args.seed), []
    for splits, ctas in SPLITS_AND_CTAS:
        scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
        size = workspace_size(case.config, {"T": case.tokens}, scalars)
        for schedule in SCHEDULES:
            call = inputs.call(scalars, size)
            if splits > 1:  # the largest scores would make it one split
                call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
            try:
                outcome = target.run(compiled, call, schedule, args.seed)
                largest = inputs.expected()[2] if splits > 1 else outcome["max_logits"]
                assert_paged_close(inputs, outcome["o"], outcome["lse"], largest)
            except (AssertionError, KernelFault, Deadlock) as fault:
                print(f"dsv4 sim: {type(fault).__name__}: {fault}", file=sys.stderr)
                return CHECK_FAILED
            reports.append(outcome.report)
            print(
                f"{ARCH}, {case.tokens} tokens, {args.heads} heads of {args.head_dim}, "
                f"{args.format} pages by {args.form}, {splits} splits, {schedule}: close, no race"
            )
    missed = missed_synchronisation(reports)
    for left, total in missed.values():
        print(f"synchronisation never reached: {left} of {total}")
    return NOT_COVERED if missed else 0
