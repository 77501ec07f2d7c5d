"""Compiled linears, and the launches that must notice a change of them: clusters with several
tiles, so that rings wrap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from dsv4.testing import (
    fp8_linear,
    grouped_linear,
    head_rotation,
    linear_argmax,
    merged_linear,
    plain_linear,
)
from dsv4.testing.harness import Outcome
from tests.simulator.helpers.subjects import FEW_SMS, SEED, Subject, subject_of_op

MANY_ROWS = 32768  # of a configuration whose tiles have one CTA
MERGED = "328 float8_e8m0fnu bfloat16, 392 bfloat16 float32"


@cache
def merged(tokens: int, tiling: int) -> Subject:
    from dsv4.kernels.gemm.merged_plan import tilings

    inputs = merged_linear.Inputs.make(merged_linear.Case(tokens, 512, MERGED), SEED)
    scalars = {"tiling": tiling % len(tilings(inputs.config)), "num_sms": FEW_SMS}
    return subject_of_op(
        "sm_90a",
        [(inputs, scalars)],
        lambda given, found: merged_linear.assert_merged_close(found, given),
    )


@cache
def blackwell_merged(case: merged_linear.Case, tiling: int) -> Subject:
    """A tiling of Blackwell's kernels; CTAs of both kinds have several tiles."""
    inputs = merged_linear.Inputs.make(case, SEED)
    return subject_of_op(
        "sm_100a",
        [(inputs, {"tiling": tiling, "num_sms": FEW_SMS})],
        lambda given, found: merged_linear.assert_merged_close(found, given),
    )


@cache
def blackwell_fp8(case: fp8_linear.Case, rows: int, tiling: int) -> Subject:
    """A tiling of Blackwell's kernels; `rows` decide the slices."""
    inputs = replace(fp8_linear.Inputs.make(case, SEED), rows=rows)
    return subject_of_op(
        "sm_100a",
        [(inputs, {"tiling": tiling, "num_sms": 1})],
        lambda given, found: fp8_linear.assert_linear_close(found["out"], given),
    )


@cache
def rotated(tokens: int, tiling: int) -> Subject:
    """With the epilogue that rotates heads."""
    from dsv4.kernels.gemm.plan import tilings

    case = fp8_linear.Case(tokens, 1024, 256)
    inputs = replace(head_rotation.Inputs.make_heads(case, 128, SEED), rows=MANY_ROWS)
    scalars = {"tiling": tiling % len(tilings(inputs.config)), "num_sms": 1}
    return subject_of_op(
        "sm_90a",
        [(inputs, scalars)],
        lambda given, found: head_rotation.assert_heads_close(
            found["out"], found["squares"], given
        ),
    )


@cache
def grouped(tokens: int, tiling: int) -> Subject:
    from dsv4.kernels.gemm.grouped_plan import tilings

    inputs = grouped_linear.Inputs.make(grouped_linear.Case(tokens, 512, 256, 3), SEED)
    scalars = {"tiling": tiling % len(tilings(inputs.config)), "num_sms": 1}
    return subject_of_op(
        "sm_90a",
        [(inputs, scalars)],
        lambda given, found: grouped_linear.assert_grouped_close(found["out"], given),
    )


@cache
def blackwell_argmax(tokens: int, tiling: int) -> Subject:
    """A tiling of Blackwell's kernels: CTAs that meet at the counter."""
    case = fp8_linear.Case(tokens, 512, 712, out_dtype="float32")
    inputs = linear_argmax.Inputs.make(case, SEED)

    def check(given: linear_argmax.Inputs, found: Outcome) -> None:
        plain_linear.assert_plain_close(found["out"], given.plain)
        assert torch.equal(found["rows"], linear_argmax.rows_of(found["out"]))

    scalars = {"tiling": tiling, "num_sms": 1}
    return subject_of_op("sm_100a", [(inputs, scalars)], check)


@cache
def blackwell_grouped(case: grouped_linear.Case, tiling: int) -> Subject:
    """A tiling of Blackwell's kernels."""
    inputs = grouped_linear.Inputs.make(case, SEED)
    return subject_of_op(
        "sm_100a",
        [(inputs, {"tiling": tiling, "num_sms": 1})],
        lambda given, found: grouped_linear.assert_grouped_close(found["out"], given),
    )


@cache
def plain(tokens: int, tiling: int) -> Subject:
    from dsv4.kernels.gemm.plain_plan import TILINGS

    case = fp8_linear.Case(tokens, 512, 328, out_dtype="float32")
    inputs = plain_linear.Inputs.make(case, SEED)
    scalars = {"tiling": tiling % len(TILINGS), "num_sms": 1}
    return subject_of_op(
        "sm_90a",
        [(inputs, scalars)],
        lambda given, found: plain_linear.assert_plain_close(found["out"], given),
    )


@cache
def argmax(tokens: int, tiling: int, num_sms: int = FEW_SMS) -> Subject:
    """CTAs that meet at the counter; wide tiles are those of pairs."""
    from dsv4.kernels.gemm.plain_plan import TILINGS

    case = fp8_linear.Case(tokens, 512, 328, out_dtype="float32")
    inputs = linear_argmax.Inputs.make(case, SEED)
    scalars = {"tiling": tiling % len(TILINGS), "num_sms": num_sms}

    def check(given: linear_argmax.Inputs, found: Outcome) -> None:
        plain_linear.assert_plain_close(found["out"], given.plain)
        assert torch.equal(found["rows"], linear_argmax.rows_of(found["out"]))

    return subject_of_op("sm_90a", [(inputs, scalars)], check)
