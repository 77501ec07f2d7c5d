"""Splits of the paged swap-AB kernel that meet in a cluster, simulated: the bits are those of
splits that meet in the workspace.

The number of SMs says which way a launch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dsv4.kernels.attention.paged_plan import workspace_size
from dsv4.kernels.attention.split_kv import SWAP_AB_TILE_HEADS, meets_in_cluster
from dsv4.testing.harness import Device, Outcome, Simulator, Target, simulator
from dsv4.testing.mutate import at
from dsv4.testing.paged_attention import Case, Inputs, assert_paged_close, make_inputs
from dsv4.testing.paged_kernel import compiled_kernel
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("H")

cutlass = pytest.importorskip("cutlass")

SMS = 132
OPTIONS = {
    "ragged": True, "padded": True, "wild": True, "has_rope": True, "has_factor": True,
    "has_signs": True,
}  # fmt: skip
# Two key tiles and one of the window, at most: of eight splits and more some have no keys.
SMALL = Case(3, 1, 8, 64, "bf16", 40, 100, 53, 2, **OPTIONS)
ENTRIES = Case(2, 1, 16, 512, "fp8", 40, 200, 64, 53, **OPTIONS)


@pytest.fixture(
    scope="module",
    params=["sm_90a", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.sm90])],
)
def target(request: pytest.FixtureRequest) -> Target:
    return Device() if request.param == "cuda" else simulator(request.param)


def head_tiles(case: Case) -> int:
    """Of all tokens."""
    return case.tokens * max(case.heads // SWAP_AB_TILE_HEADS, 1)


def run(
    target: Target, compiled, inputs: Inputs, splits: int, num_sms: int, schedule: str, seed: int
) -> Outcome:
    """A launch, compared with the oracle."""
    case = inputs.case
    scalars = (splits, num_sms, case.config.sliding_window, case.config.ratio)
    call = inputs.call(scalars, workspace_size(case.config, {"T": case.tokens}, scalars))
    # The largest scores would make it one split.
    call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
    outcome = target.run(compiled, call.to(target.device), schedule, seed)
    assert_paged_close(inputs, outcome["o"], outcome["lse"], inputs.expected()[2])
    if outcome.report is not None:
        (launch,) = outcome.report.launches
        is_clustered = meets_in_cluster(head_tiles(case), splits, num_sms)
        pairs = 1 if head_tiles(case) // case.tokens % 2 else 2
        assert launch.cluster == ((splits if is_clustered else pairs), 1, 1)
    return outcome


def check(
    target: Target,
    case: Case,
    splits: int,
    seed: int,
    schedules: Sequence[str] | None = None,
    empty: int | None = None,
    build: Callable | None = None,
) -> None:
    """In a cluster, in every schedule, the bits of a launch through the workspace, of as many CTAs.

    Args:
        empty: a token without any key.
        build: of the kernel; None: that of the package.
    """
    inputs = make_inputs(case, seed)
    if empty is not None:
        inputs.window_lens[empty] = inputs.compressed_lens[empty] = 0
    if build is None:
        compiled = compiled_kernel(target, case)
    else:
        compiled = target.compile(build, case.config)
    schedules = target.schedules if schedules is None else schedules
    work_tiles = head_tiles(case) * splits
    assert meets_in_cluster(head_tiles(case), splits, SMS)
    assert not meets_in_cluster(head_tiles(case), splits, work_tiles)
    wanted = run(target, compiled, inputs, splits, work_tiles, schedules[0], seed)
    for schedule in schedules:
        found = run(target, compiled, inputs, splits, SMS, schedule, seed)
        wanted.assert_same_bits(found, f"{splits} splits, {schedule}")
        assert (found.scratch["workspace"] == 0).all()


@pytest.mark.parametrize("splits", [2, 3, 8, 13, 16])
def test_rows(target, splits, seed) -> None:
    check(target, SMALL, splits, seed, empty=1)


@pytest.mark.parametrize("splits", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_entries(target, splits, seed) -> None:
    check(target, ENTRIES, splits, seed)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 5, 8, 12])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 64, 512, "fp8", 40, 300, 64, 53, sink_mode="swa_gate", **OPTIONS),
        Case(1, 2, 32, 512, "bf16", 40, 300, 53, 61, "table", **OPTIONS),
        Case(3, 1, 24, 128, "bf16", 40, 300, sink_mode="swa_gate", **OPTIONS),
    ],
    ids=str,
)
def test_head_tiles(target, case, splits, seed) -> None:
    """Several of a token; of 24 heads, whose row sums are reduced early."""
    check(target, case, splits, seed)


@pytest.mark.slow
def test_a_fixed_number_of_splits(target, seed) -> None:
    check(target, replace(SMALL, num_splits=5), 5, seed)


def checked(build: Callable, seed: int) -> None:
    case = replace(SMALL, heads=32)
    check(Simulator("sm_90a"), case, 4, seed, schedules=("lazy", "random"), build=build)


MEET = at("SwapAbCluster.meet")
BUGS = {
    "the cluster's barrier left out": MEET.call("self._wait_for_splits").delete(),
    "rows that no barrier releases": at("SwapAbCluster._wait_for_splits")
    .expression("cute.arch.cluster_arrive()")
    .replace("cute.arch.cluster_arrive_relaxed()"),
    "no arrival at the barrier of rows": at("SwapAbCluster._wait_for_splits")
    .call("cute.arch.cluster_arrive")
    .delete(),
    "rows not waited for": at("SwapAbCluster._wait_for_splits")
    .call("cute.arch.cluster_wait")
    .delete(),
    "no arrival at the last barrier": at("SwapAbCluster._leave")
    .call("cute.arch.cluster_arrive")
    .delete(),
    "reads that no barrier releases": at("SwapAbCluster._leave")
    .expression("cute.arch.cluster_arrive()")
    .replace("cute.arch.cluster_arrive_relaxed()"),
    "a CTA ends while others read": MEET.call("cute.arch.cluster_wait").delete(),
    "rows of another split": at("SwapAbCluster._load")
    .expression("cutlass.Int32(split)")
    .replace("cutlass.Int32(0)"),
    "a cluster of several head tiles' splits": at("SwapAbTiling.first")
    .expression("cutlass.Int32(index)")
    .replace("cutlass.Int32(cta)"),
}

(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.attention.sm90.paged", checked)
