"""Deleting any one barrier between the threads that make codes of index heads, or of what keeps
shared memory for them, is noticed, and so is any weaker qualifier.

Their products are those of `fp8_linear`, whose deletions have a test of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.ops.index_keys import decode_index
from dsv4.ops.merged_linear import MERGED_LINEAR
from dsv4.testing.fp8_linear import Case
from dsv4.testing.harness import SCHEDULES, Simulator
from dsv4.testing.index_rounding import Inputs, MergedInputs
from dsv4.testing.kernel_call import OpInputs, OpKernels
from dsv4.testing.merged_linear import Case as MergedCase
from tests.kernels.gemm.fp8_kernels import some_tilings
from tests.simulator.helpers.changes import check, deletions_of, weakenings_of
from tests.simulator.helpers.mutations import Run, run_of

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

SEED = 1
MOST_ERROR = 0.25  # of a head's norm: FP4 loses a tenth, and what tips there is less
MERGED = "256 float8_e8m0fnu bfloat16, 128 float8_e8m0fnu bfloat16"
FUNCTIONS = ("sync_consumers", "sync_group", "drain", "_store_staged", "_store_span", "_sync")


SCALES = {
    ("bar.sync", "sync_consumers"): (
        2,
        "keeps the scales of a token tile until all have used them: the epilogue's barriers, too; "
        "and lets all read rows that are cleared: the barrier behind the scales does, too",
    )
}
PARTS = {
    ("bar.sync", "sync_consumers"): (
        3,
        "those; and what keeps heads until all have read them: the parts that a tile waits for "
        "were sent by warps that had",
    )
}
LAST = {
    ("cp.async", "drain"): (1, "behind the last tile: its heads took the place of what is sent")
}


class Subject(NamedTuple):
    """A tiling by its place, inputs of several tiles of tokens, and what is not missed."""

    arch: str
    tiling: int
    make: Callable[[], OpInputs]
    redundant: dict[tuple[str, str], tuple[int, str]]


def alone() -> Inputs:
    """Three tiles of up to 16 tokens of three heads, for two CTAs: of many rows."""
    return replace(Inputs.make_heads(Case(35, 512, 384), SEED), rows=32768)


def shared() -> Inputs:
    """The same of few rows: CTAs that share a tile have groups of tokens to round."""
    return replace(alone(), rows=None)


def beside() -> MergedInputs:
    """Tiles of 64 tokens, of heads that are stored by TMA and of heads that are rounded."""
    case = MergedCase(150, 512, MERGED, has_codes=True)
    return MergedInputs.make_heads(case, 128, SEED)


SUBJECTS = {
    "Hopper, alone": Subject("sm_90a", 0, alone, SCALES),
    "Hopper, clusters": Subject("sm_90a", 0, shared, PARTS),
    "Hopper, beside rotated heads": Subject("sm_90a", 1, beside, {**SCALES, **LAST}),
    "Blackwell, alone": Subject("sm_100a", 0, alone, {}),
}


def values_of(inputs: OpInputs, found: dict[str, torch.Tensor]) -> None:
    """Fail where heads are further from those of the torch implementation than FP4 makes them."""
    suffix = "_1" if isinstance(inputs, MergedInputs) else ""
    index = inputs.index if suffix else inputs
    heads = index.case.out_features // 128
    pairs = []
    expected = index.applied(index.expected().bfloat16())
    for codes, scales in ((found[f"out{suffix}"], found[f"head_scales{suffix}"]), expected):
        pairs.append(decode_index(codes.unflatten(1, (heads, 128)), scales))
    error = (pairs[0] - pairs[1]).norm(dim=-1) / pairs[1].norm(dim=-1)
    assert (error <= MOST_ERROR).all()


@cache
def kernel(name: str):
    """The compiled kernel, and the launches that must notice a deletion."""
    subject = SUBJECTS[name]
    inputs = subject.make()
    op = MERGED_LINEAR if isinstance(inputs, MergedInputs) else FP8_LINEAR
    which = slice(subject.tiling, subject.tiling + 1)
    kernels = OpKernels(op, Simulator(subject.arch, has_lines=True))
    with some_tilings(op, which, arch=subject.arch):
        compiled = kernels.compile(inputs.config)
    required = [arg.name for arg in op.tensors if not arg.is_optional]

    def check(positional: tuple, keywords: dict) -> None:
        values_of(inputs, {**dict(zip(required, positional)), **keywords})

    def run(schedule: str) -> Run:
        return run_of(lambda: kernels.call(inputs, tiling=0, num_sms=1), check, schedule)

    return compiled, [run(schedule) for schedule in SCHEDULES[:2]]


@pytest.mark.parametrize("name", SUBJECTS)
def test_all_deletions_are_noticed(name: str) -> None:
    """Those of the epilogue."""
    compiled, runs = kernel(name)
    found = deletions_of(compiled.artifacts.PTX)
    changes = [change for change in found if change.place[1] in FUNCTIONS]
    assert changes
    check(compiled, runs, changes, SUBJECTS[name].redundant, {})


@pytest.mark.parametrize("name", SUBJECTS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    """Of the epilogue: barriers have none, the proxy fence of heads that TMA stores has one."""
    compiled, runs = kernel(name)
    found = weakenings_of(compiled.artifacts.PTX)
    changes = [change for change in found if change.place[1] in FUNCTIONS]
    assert len(changes) == int(SUBJECTS[name].make is beside), changes
    if changes:
        check(compiled, runs[:1], changes, {}, {})
