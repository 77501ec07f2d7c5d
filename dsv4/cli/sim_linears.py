"""`dsv4 sim grouped_linear`, `plain_linear`, `linear_argmax`: simulated in every tiling."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dsv4.cli.sim_check import CheckedLaunches, Size, add_command

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp
    from dsv4.testing.harness import Outcome
    from dsv4.testing.kernel_call import OpInputs

FEW_SMS = 2  # clusters have several tiles: rings wrap
TOKENS = Size("tokens", 67, "T")
WIDTH = Size("width", 1024, "K, input features, a multiple of 512")
ROWS = Size("rows", 392, "M, output features")
GROUPS = (
    TOKENS,
    Size("width", 1024, "K, input features of a group, a multiple of 512"),
    Size("rows", 256, "output features of a group, a multiple of 256"),
    Size("groups", 2, "that have input features and rows of their own"),
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the commands."""
    way = (
        "simulate each tiling in every schedule, compare one with exact sums and all others with "
        "it, bit for bit"
    )
    add_command(
        kernels,
        "grouped_linear",
        "linears of a group of features each, every tiling",
        "Compile the kernels, simulate each tiling, in turns in every schedule, compare one with "
        "exact sums and all others with it, bit for bit; outputs as they are, and as FP8 codes, "
        "also of inputs in codes.",
        GROUPS,
        run_grouped,
        has_arch=True,
    )
    add_command(
        kernels,
        "plain_linear",
        "linear with bf16 weights, every tiling in every schedule",
        f"Compile the kernels, {way}.",
        (TOKENS, ROWS, WIDTH),
        run_plain,
        has_arch=True,
    )
    add_command(
        kernels,
        "linear_argmax",
        "the row of each token's largest product, every tiling in every schedule",
        f"Compile the kernels, {way}; rows of the largest outputs with the outputs, and alone.",
        (TOKENS, ROWS, WIDTH),
        run_argmax,
        has_arch=True,
    )


class _Tilings:
    """Launches of every tiling in every schedule, whose bits agree."""

    def __init__(self, args: argparse.Namespace, op: KernelOp) -> None:
        from dsv4.testing.kernel_call import OpKernels

        self.launches = CheckedLaunches(args, args.arch)
        self.kernels = OpKernels(op, self.launches.target)

    def check(
        self,
        inputs: OpInputs,
        tilings: Sequence[Any],
        what: str,
        check: Callable[[Outcome], None],
        in_turns: bool = False,
    ) -> None:
        """Simulate all of them in every schedule, or each in another one, and print one line per
        launch; `check` is for the first."""
        from dsv4.testing.harness import SCHEDULES

        compiled, first = self.kernels.compile(inputs.config), None
        for index, tiling in enumerate(tilings):
            call = partial(self.kernels.call, inputs, tiling=index, num_sms=FEW_SMS)
            turn = index % len(SCHEDULES)
            for schedule in SCHEDULES[turn : turn + 1] if in_turns else SCHEDULES:
                outcome = self.launches.run(compiled, call, schedule)
                if first is None:
                    first = outcome
                    check(first)
                first.assert_same_bits(outcome, f"{tiling}, {schedule}")
                print(
                    f"{self.kernels.target.arch}, {what}, tiles of {tiling.tokens} tokens, "
                    f"{schedule}: equal bits, no race"
                )


def run_grouped(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dataclasses import replace

    from dsv4.kernels.gemm.grouped_config import CODES
    from dsv4.ops.grouped_linear import GROUPED_LINEAR, PLANS
    from dsv4.testing.grouped_linear import Case, Inputs, assert_grouped_close

    case = Case(args.tokens, args.width, args.rows, args.groups)
    every, tilings = _Tilings(args, GROUPED_LINEAR), PLANS[args.arch].tilings
    inputs, codes = (
        Inputs.make(replace(case, out_dtype=dtype), args.seed) for dtype in (case.out_dtype, CODES)
    )
    what = f"{args.tokens} tokens, {args.groups} groups of {args.rows} x {args.width}"
    with every.launches.checks():
        every.check(
            inputs,
            tilings(inputs.config),
            what,
            lambda found: assert_grouped_close(found["out"], inputs),
            in_turns=True,
        )
        every.check(
            codes, tilings(codes.config), f"{what}, codes", lambda found: None, in_turns=True
        )
        given = codes.of_codes
        every.check(
            given,
            tilings(given.config),
            f"{what}, codes of codes",
            lambda found: None,
            in_turns=True,
        )
    return every.launches.finish()


def run_plain(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dsv4.ops.plain_linear import PLAIN_LINEAR, PLANS
    from dsv4.testing.fp8_linear import Case
    from dsv4.testing.plain_linear import Inputs, assert_plain_close

    every = _Tilings(args, PLAIN_LINEAR)
    inputs = Inputs.make(Case(args.tokens, args.width, args.rows), args.seed)
    what = f"{args.tokens} tokens, {args.rows} x {args.width}"
    with every.launches.checks():
        every.check(
            inputs,
            PLANS[args.arch].TILINGS,
            what,
            lambda found: assert_plain_close(found["out"], inputs),
        )
    return every.launches.finish()


def run_argmax(args: argparse.Namespace) -> int:
    """Simulate and print one line per launch."""
    from dataclasses import replace

    from dsv4.ops.linear_argmax import LINEAR_ARGMAX
    from dsv4.ops.plain_linear import PLANS
    from dsv4.testing.fp8_linear import Case
    from dsv4.testing.linear_argmax import Inputs, rows_of
    from dsv4.testing.plain_linear import assert_plain_close

    every = _Tilings(args, LINEAR_ARGMAX)
    case = Case(args.tokens, args.width, args.rows, out_dtype="float32")
    inputs = Inputs.make(case, args.seed)
    what = f"{args.tokens} tokens, best of {args.rows} x {args.width}"
    found_rows, tilings = [], PLANS[args.arch].TILINGS

    def check(found: Outcome) -> None:
        assert_plain_close(found["out"], inputs.plain)
        assert found["rows"].equal(rows_of(found["out"])), "rows: not those of the largest outputs"
        found_rows.append(found["rows"])

    def check_alone(found: Outcome) -> None:
        assert found["rows"].equal(found_rows[0]), "rows: others without outputs"

    with every.launches.checks():
        every.check(inputs, tilings, what, check)
        every.check(replace(inputs, writes=False), tilings, f"{what}, rows alone", check_alone)
    return every.launches.finish()
