"""Deleting any one synchronisation instruction of the indexer, or weakening any one of its
qualifiers by a step, is noticed.

Its kernels: one launch, by clusters of three sizes; scores; the choice, by CTAs and clusters of two
sizes. A place that several of them have counts once for each. With FP4 keys, and on Blackwell: one
launch, by the smallest clusters, and scores; the choice is the same. Of scores in fp32: the choice.
"""

from __future__ import annotations

import pytest

from dsv4.kernels.kit.index_entry import INDEX_FORMATS
from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import index_choice
from tests.simulator.helpers.changes import check_deleted, check_weaker
from tests.simulator.races.test_deleted_synchronisation import EXPECTED_LATE
from tests.simulator.races.test_fp8_linear_mutations import CLUSTER, EXPECTS, FIRST, LAUNCH
from tests.simulator.races.test_weaker_qualifiers import BEGUN, OF_ONE_CTA

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

LONG_RING = (
    "one launch by 16 CTAs: none has more tiles here than its ring has stages; in smaller "
    "clusters, whose loop is the same function, it is noticed"
)
FENCED_AGAIN = (
    "one launch: thread 0, the lane that is elected, fences again behind the mbarriers of what is "
    "sent, before the same barrier of the cluster"
)
COUNTED = (
    "before a token's queries are stored: at the barrier before the counts of the token before "
    "were added up, all were done with that one's queries and factors"
)
HINT = "a hint, which moves nothing but lines of L2"
DELETED = {
    ("griddepcontrol.launch_dependents", "kernel"): (7, LAUNCH),
    # Of one launch, by load warps and where all are chosen; of scores, by both roles.
    ("griddepcontrol.wait", "kernel"): (8, FIRST),
    ("griddepcontrol.wait", "share_queries"): (3, FIRST),
    ("cp.async", "bulk_prefetch"): (4, HINT),
    ("fence.mbarrier_init", "prepare"): (3, FENCED_AGAIN),
    ("bar.warp", "load_run"): (4, EXPECTED_LATE),
    ("mbarrier.try_wait", "load_run"): (1, LONG_RING),
    ("bar.warp", "arrive_warp"): (1, LONG_RING),
    ("mbarrier.arrive", "arrive_warp"): (1, LONG_RING),
    ("bar.sync", "sync_consumers"): (1, COUNTED),
    # Of clusters of the choice.
    ("bar.sync", "exchange"): (2, CLUSTER),
    ("atom.shared", "__init__"): (
        11,
        "work, not order: counts whose loss moves no choice here; of keys above the bin (1), only "
        "CTAs behind this one need the number, and there is one",
    ),
}
WEAKER = {
    ("atom.shared", "__init__", "cluster"): (58, OF_ONE_CTA),
    ("barrier.cluster", "exchange", "relaxed"): (
        2,
        f"the first one: {BEGUN}; within a CTA, the barrier before it orders",
    ),
    # Of queries, and of counts, which CTAs of the cluster send.
    ("mbarrier.arrive", "kernel", "relaxed"): (6, EXPECTS),
    ("mbarrier.arrive", "load_run", "relaxed"): (4, EXPECTS),
    ("mbarrier.try_wait", "load_run", "relaxed"): (1, LONG_RING),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, LONG_RING),
}
SCORING = ("OneLaunch", "Scores")
# Rings go round in both, and no count is lost.
FP4_DELETED = {
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (4, FIRST),
    ("griddepcontrol.wait", "share_queries"): (1, FIRST),
    ("cp.async", "bulk_prefetch"): (2, HINT),
    ("fence.mbarrier_init", "prepare"): (1, FENCED_AGAIN),
    ("bar.warp", "load_run"): (2, EXPECTED_LATE),
    ("bar.sync", "sync_consumers"): (1, COUNTED),
}
FP4_WEAKER = {
    ("atom.shared", "__init__", "cluster"): (11, OF_ONE_CTA),
    ("mbarrier.arrive", "kernel", "relaxed"): (2, EXPECTS),
    ("mbarrier.arrive", "load_run", "relaxed"): (2, EXPECTS),
}
FP32_DELETED = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("atom.shared", "__init__"): (21, "work, not order: counts whose loss moves no choice here"),
}
FP32_WEAKER = {("atom.shared", "__init__", "cluster"): (40, OF_ONE_CTA)}
BLACKWELL_DELETED = {
    **FP4_DELETED,
    ("bar.warp", "arrive_warp"): (
        2,
        "a stage that is released: its keys and scales were read before the warpgroup's barrier "
        "ahead of the products",
    ),
}


def test_all_deletions_are_noticed() -> None:
    compiled, runs = index_choice.choice()
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], DELETED)


def test_all_weaker_qualifiers_are_noticed() -> None:
    compiled, runs = index_choice.choice()
    check_weaker(compiled, runs("eager"), WEAKER)


def test_all_deletions_with_fp4_keys_are_noticed() -> None:
    compiled, runs = index_choice.choice("fp4")
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check_deleted(compiled, all_runs, FP4_DELETED, entries=SCORING)


def test_all_weaker_qualifiers_with_fp4_keys_are_noticed() -> None:
    compiled, runs = index_choice.choice("fp4")
    check_weaker(compiled, runs("eager"), FP4_WEAKER, entries=SCORING)


@pytest.mark.parametrize("key_format", INDEX_FORMATS)
def test_all_deletions_on_blackwell_are_noticed(key_format: str) -> None:
    compiled, runs = index_choice.choice(key_format, "sm_100a")
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check_deleted(compiled, all_runs, BLACKWELL_DELETED, entries=SCORING)


@pytest.mark.parametrize("key_format", INDEX_FORMATS)
def test_all_weaker_qualifiers_on_blackwell_are_noticed(key_format: str) -> None:
    compiled, runs = index_choice.choice(key_format, "sm_100a")
    check_weaker(compiled, runs("eager"), FP4_WEAKER, entries=SCORING)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_all_deletions_with_scores_in_fp32_are_noticed(arch: str) -> None:
    compiled, runs = index_choice.choice_fp32(arch)
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check_deleted(compiled, all_runs, FP32_DELETED, entries=("SelectFp32",))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_all_weaker_qualifiers_with_scores_in_fp32_are_noticed(arch: str) -> None:
    compiled, runs = index_choice.choice_fp32(arch)
    check_weaker(compiled, runs("eager"), FP32_WEAKER, entries=("SelectFp32",))
