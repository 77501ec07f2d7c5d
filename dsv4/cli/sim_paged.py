"""`dsv4 sim paged`: attention over pages of a cache, simulated in every schedule and compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
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
    launches = CheckedLaunches(args, args.arch)
    run_form, forms = (_run_codes, FORMS[:1]) if args.codes else (_run_rows, FORMS)
    with launches.checks():
        for form in (args.form,) if args.form else forms:
            run_form(args, launches, form)
    return launches.finish()


def _run_rows(args: argparse.Namespace, launches: CheckedLaunches, form: str) -> None:
    """Launches that write rows, compared with the oracle."""
    from dsv4.testing.paged_attention import assert_paged_close, make_inputs
    from dsv4.testing.paged_kernel import compiled_kernel

    case = _case(args, form)
    compiled = compiled_kernel(launches.target, case)
    inputs = make_inputs(case, args.seed)
    for scalars, size, schedules in _each(case):
        splits = scalars[0]

        def call(scalars=scalars, size=size):
            made = inputs.call(scalars, size)
            if scalars[0] > 1:  # the largest scores would make it one split
                made.options["max_logits"] = made.outputs.pop("max_logits")[:0]
            return made

        for schedule in schedules:
            outcome = launches.run(compiled, call, schedule)
            largest = inputs.expected()[2] if splits > 1 else outcome["max_logits"]
            assert_paged_close(inputs, outcome["o"], outcome["lse"], largest)
            _say(args, case, scalars, f"{schedule}: close")


def _run_codes(args: argparse.Namespace, launches: CheckedLaunches, form: str) -> None:
    """Launches that write codes, compared with the rows that an unchecked launch writes."""
    from dsv4.testing.harness import SCHEDULES
    from dsv4.testing.paged_attention import assert_codes_of, make_inputs
    from dsv4.testing.paged_kernel import compiled_kernel

    case = _case(args, form)
    inputs = make_inputs(replace(case, rounds_output=True), args.seed)
    exact = replace(inputs, case=case)
    compiled = compiled_kernel(launches.target, inputs.case)
    other = compiled_kernel(launches.target, case)
    for scalars, size, schedules in _each(case):
        call = exact.call(scalars, size)
        call.options["max_logits"] = call.options["max_logits"][:0]
        rows = launches.target.run(other, call, SCHEDULES[0], races=False)["o"]
        for schedule in schedules:
            outcome = launches.run(compiled, partial(inputs.call, scalars, size), schedule)
            assert_codes_of(outcome.outputs, rows)
            _say(args, case, scalars, f"{schedule}: codes of the rows")


def _each(case: Case) -> Iterator[tuple[tuple[int, ...], int, Sequence[str]]]:
    """Scalars of each launch, elements of its workspace, and its schedules."""
    from dsv4.kernels.attention.paged_plan import workspace_size
    from dsv4.testing.harness import SCHEDULES

    for pair in FEW + MANY:
        scalars = (*pair, case.config.sliding_window, case.config.ratio)
        size = workspace_size(case.config, {"T": case.tokens}, scalars)
        yield scalars, size, SCHEDULES if pair in FEW else SCHEDULES[-1:]


def _say(args: argparse.Namespace, case: Case, scalars: tuple[int, ...], verdict: str) -> None:
    splits, ctas = scalars[:2]
    print(
        f"{args.arch}, {case.tokens} tokens, {args.heads} heads of {args.head_dim}, "
        f"{args.format} pages by {case.form}, {splits} splits, {ctas} CTAs, {verdict}, no race"
    )


def _case(args: argparse.Namespace, form: str) -> Case:
    from dsv4.testing.paged_attention import Case

    return Case(
        3, 1, args.heads, args.head_dim, args.format, args.window, args.entries, 53, 61,
        form, wild=form == "list", growing=True, compute=args.compute,
        uniform=args.compute != COMPUTE[0], **RAGGED,
    )  # fmt: skip
