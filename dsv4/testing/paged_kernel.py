"""Paged attention kernels on a target, in every schedule, compared with the FP32 oracle."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsv4.kernels.attention.paged_plan import rounds_rows, workspace_size
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.testing.harness import SCHEDULES, Outcome, Target
from dsv4.testing.paged_attention import (
    Case,
    Inputs,
    assert_codes_of,
    assert_paged_close,
    make_inputs,
)


def compiled_kernel(target: Target, case: Case):
    """The kernel of a case on a target."""
    build = importlib.import_module(SPARSE_FMHA_PAGED.kernels[target.arch]).build
    return target.compile(build, SPARSE_FMHA_PAGED.compiled_config(case.config, target.arch))


def run_case(
    target: Target,
    case: Case,
    seed: int,
    splits: int = 1,
    ctas: int = 3,
    schedules: Sequence[str] = SCHEDULES,
    inputs: Inputs | None = None,
) -> Iterator[tuple[str, Outcome]]:
    """Run a case in one schedule after another: (schedule, outcome), compared with the oracle.

    Args:
        ctas: that run at a time; fewer than work items, so that each goes through several.
        inputs: of the case; None: made from the seed.

    Raises:
        AssertionError: a result is wrong, or a race was found.
    """
    kernel = compiled_kernel(target, case)
    inputs = make_inputs(case, seed) if inputs is None else inputs
    scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
    size = workspace_size(case.config, {"T": case.tokens}, scalars)
    for schedule in schedules:
        call = inputs.call(scalars, size)
        if splits > 1:
            # The largest scores would make it one split.
            call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
        outcome = target.run(kernel, call, schedule, seed)
        largest = inputs.expected()[2] if splits > 1 else outcome["max_logits"]
        assert_paged_close(inputs, outcome["o"], outcome["lse"], largest)
        yield schedule, outcome


def run_rounded(
    target: Target,
    case: Case,
    seed: int,
    splits: int = 1,
    ctas: int = 3,
    schedules: Sequence[str] = SCHEDULES,
    inputs: Inputs | None = None,
) -> Iterator[tuple[str, Outcome]]:
    """Run a case whose output is codes: compared with the rows of the kernel that does not round
    them, which are compared with the oracle. Arguments as `run_case` has them.

    Raises:
        AssertionError: a result is wrong, or a race was found.
    """
    inputs = make_inputs(case, seed) if inputs is None else inputs
    exact = replace(inputs, case=replace(case, rounds_output=False))
    scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
    size = workspace_size(case.config, {"T": case.tokens}, scalars)
    first = schedules[:1]
    ((_, rows),) = run_case(target, exact.case, seed, splits, ctas, first, exact)
    kernel = compiled_kernel(target, case)
    for schedule in schedules:
        outcome = target.run(kernel, inputs.call(scalars, size), schedule, seed)
        assert_codes_of(outcome.outputs, rows["o"])
        yield schedule, outcome


def check_rounded(
    target: Target,
    case: Case,
    seed: int,
    splits: int = 1,
    ctas: int = 3,
    schedules: Sequence[str] = SCHEDULES,
    inputs: Inputs | None = None,
) -> None:
    """Run a case as `run_rounded` does. Rows that are rounded on their way are never written.

    Raises:
        AssertionError: as there, or rows are written or missing.
    """
    is_rounded = rounds_rows(case.config, case.tokens, splits, ctas, target.arch)
    for _, outcome in run_rounded(target, case, seed, splits, ctas, schedules, inputs):
        assert bool(outcome["o"].isnan().all()) == is_rounded
