"""Deleting any one synchronisation instruction of Hopper's experts of many tokens, or weakening any
one of its qualifiers by a step, is noticed: FP4 beside a shared expert in FP8, tokens of a tile for
one CTA or for two of a cluster."""

from __future__ import annotations

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import experts
from tests.simulator.helpers.changes import check_deleted, check_weaker
from tests.simulator.races.test_fp8_linear_mutations import (
    CLUSTER,
    EXPECTS,
    FENCE,
    FIRST,
    LAUNCH,
    UNDER_WAY,
    fences,
)

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

BEHIND_RING = (
    "of down: reads lists, which no launch here writes; its outputs come behind the ring, whose "
    "load warps wait"
)
BEGUN = (
    "the first one tells that the other CTA has begun, and of its mbarriers: with their fence, a "
    "relaxed arrival is enough for both"
)
FENCED = "behind the fence, which releases as much"
# What is not missed, and what may be weaker: by instruction, the kernel's function and the new
# qualifier, how many of them, and why.
DELETED = {
    # Of tokens gathered, both products, h rounded, the sum over experts.
    ("griddepcontrol.launch_dependents", "kernel"): (5, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, f"of tokens gathered: {FIRST}"),
    ("griddepcontrol.wait", "compute"): (1, BEHIND_RING),
    # The last stage of routed and of shared tiles of both products, as below.
    FENCE: (4, UNDER_WAY),
}
WEAKER = {("mbarrier.arrive", "_load", "relaxed"): (4, EXPECTS), **fences(4)}
KERNELS = {
    "alone": (1, DELETED, {**WEAKER, ("mbarrier.arrive", "arrive_warp", "relaxed"): (4, FENCED)}),
    "shared": (
        2,
        {**DELETED, ("bar.sync", "kernel"): (2, CLUSTER)},
        {**WEAKER, ("barrier.cluster", "kernel", "relaxed"): (2, BEGUN)},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    sharing, redundant, _ = KERNELS[name]
    compiled, runs = experts.wide_experts(sharing)
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], redundant)


@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    sharing, _, harmless = KERNELS[name]
    compiled, runs = experts.wide_experts(sharing)
    check_weaker(compiled, runs("eager"), harmless)
