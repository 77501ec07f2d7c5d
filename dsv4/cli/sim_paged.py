"""`dsv4 sim paged`: attention over pages of a cache, simulated in every schedule and compared."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command
from dsv4.kernels.attention.paged_config import COMPUTE

if TYPE_CHECKING:
    from dsv4.testing.paged_attention import Case

FORMATS = ("bf16", "fp8")
FORMS = ("list", "table", "mixed")
# Splits and CTAs: so few that each CTA goes through several work items, in every schedule; so many
# that two share the columns of a head tile.
FEW, MANY = ((1, 3), (3, 2)), ((1, 12), (3, 36))
RAGGED = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True}
SIZES = (
    Size("heads", 8, "query heads"),
    Size("head-dim", 512, "of a head"),
    Size("entries", 200, "compressed entries of a token, at most"),
    Size("window", 70, "keys of the window"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        kernels,
        "paged",
        "attention over pages of a cache, lists and tables, in every schedule",
        "Compile the kernel, simulate sparse_fmha_paged on ragged requests with one and with "
        "several splits, and compare with the FP32 oracle.",
        SIZES,
        run,
        has_arch=True,
    )
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of pages (bf16)")
    parser.add_argument(
        "--compute",
        choices=COMPUTE,
        default=COMPUTE[0],
        help="products of bf16 values, or of FP8 codes with one scale an entry (bf16)",
    )
    parser.add_argument("--form", choices=FORMS, help="of the indices (all)")
    parser.add_argument(
        "--codes",
        action="store_true",
        help="give codes of two terms instead of rows, compared with what the rows become",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.kernels.attention.paged_plan import workspace_size
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.paged_attention import assert_paged_close, make_inputs
    from dsv4.testing.paged_kernel import compiled_kernel

    launches = CheckedLaunches(args, args.arch)
    if args.codes:
        return run_codes(args, launches)
    with launches.checks():
        for form in (args.form,) if args.form else FORMS:
            case = _case(args, form)
            compiled = compiled_kernel(launches.target, case)
            inputs = make_inputs(case, args.seed)
            for splits, ctas in FEW + MANY:
                scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
                size = workspace_size(case.config, {"T": case.tokens}, scalars)

                def call(inputs=inputs, scalars=scalars, size=size):
                    made = inputs.call(scalars, size)
                    if scalars[0] > 1:  # the largest scores would make it one split
                        made.options["max_logits"] = made.outputs.pop("max_logits")[:0]
                    return made

                for schedule in SCHEDULES if (splits, ctas) in FEW else SCHEDULES[-1:]:
                    outcome = launches.run(compiled, call, schedule)
                    largest = inputs.expected()[2] if splits > 1 else outcome["max_logits"]
                    assert_paged_close(inputs, outcome["o"], outcome["lse"], largest)
                    print(
                        f"{args.arch}, {case.tokens} tokens, {args.heads} heads of "
                        f"{args.head_dim}, {args.format} pages by {form}, {splits} splits, {ctas} "
                        f"CTAs, {schedule}: close, no race"
                    )
    return launches.finish()


def run_codes(args: argparse.Namespace, launches: CheckedLaunches) -> int:
    """The same of an output in codes: those of the rows that an unchecked launch gives."""
    from dsv4.kernels.attention.paged_plan import workspace_size
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.paged_attention import assert_codes_of, make_inputs
    from dsv4.testing.paged_kernel import compiled_kernel

    with launches.checks():
        for form in (args.form,) if args.form else FORMS[:1]:
            case = _case(args, form)
            inputs = make_inputs(replace(case, rounds_output=True), args.seed)
            exact = replace(inputs, case=case)
            compiled = compiled_kernel(launches.target, inputs.case)
            other = compiled_kernel(launches.target, case)
            for splits, ctas in FEW + MANY:
                scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
                size = workspace_size(case.config, {"T": case.tokens}, scalars)
                call = exact.call(scalars, size)
                call.options["max_logits"] = call.options["max_logits"][:0]
                rows = launches.target.run(other, call, SCHEDULES[0], races=False)["o"]
                for schedule in SCHEDULES if (splits, ctas) in FEW else SCHEDULES[-1:]:
                    outcome = launches.run(compiled, partial(inputs.call, scalars, size), schedule)
                    assert_codes_of(outcome.outputs, rows)
                    print(
                        f"{args.arch}, {case.tokens} tokens, {args.heads} heads of "
                        f"{args.head_dim}, {args.format} pages by {form}, {splits} splits, {ctas} "
                        f"CTAs, {schedule}: codes of the rows, no race"
                    )
    return launches.finish()


def _case(args: argparse.Namespace, form: str) -> Case:
    from dsv4.testing.paged_attention import Case

    return Case(
        3, 1, args.heads, args.head_dim, args.format, args.window, args.entries, 53, 61,
        form, wild=form == "list", growing=True, compute=args.compute,
        uniform=args.compute != COMPUTE[0], **RAGGED,
    )  # fmt: skip
