"""Deleting any one synchronisation instruction of the FP8 linear, or weakening any one of its
qualifiers by a step, is noticed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import pytest

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.ops.runtime.backend import Device
from dsv4.testing.fp8_linear import Case, Inputs, assert_linear_close
from dsv4.testing.harness import SCHEDULES, compiler_options
from tests.simulator.helpers.changes import check_deleted, check_weaker
from tests.simulator.helpers.mutations import Run, run_of

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")


NUM_SMS = 1  # a cluster has several tiles


@dataclass(frozen=True)
class Kernel:
    """A tiling, and the case that must notice a deletion: several tiles of rows and of tokens, more
    k blocks than its ring has stages."""

    case: Case
    tiling: int
    rows: int  # that decide the clusters

    @property
    def config(self) -> Fp8LinearConfig:
        return replace(self.case.config, out_features=self.rows)


KERNELS = {
    "resident": Kernel(Case(11, 1024, 136), 0, 136),
    "resident_clusters": Kernel(Case(11, 2048, 136), 0, 136),
    "streamed": Kernel(Case(19, 1024, 136), 1, 32768),
    "streamed_clusters": Kernel(Case(19, 1024, 136), 1, 136),
    # The first tile lacks tokens.
    "streamed_short": Kernel(Case(5, 1024, 520), 1, 32768),
    "wide": Kernel(Case(150, 512, 328), 3, 32768),
    "wide_clusters": Kernel(Case(150, 512, 136), 4, 136),
    "wide_short": Kernel(Case(40, 512, 840), 3, 32768),
}

# What is not missed, by instruction and the kernel's function: how many of them, and why.
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
NO_ACTIVATIONS = "this warp loads weights alone, which no launch writes"
PRODUCTS = "what was read of a stage was read by products, which the whole warpgroup has waited for"
NEW_REGISTERS = "nothing has touched the accumulators of a run's first products"
BEHIND = "the barrier behind the scales of the activations orders the same"
QUEUES = "keeps the queues in front of DRAM short: each stage is empty at first"
FILLED = ("mbarrier.try_wait", "_wait_for_weights")  # of the ring of each warpgroup
RESIDENT = {
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "compute"): (1, FIRST),
    ("griddepcontrol.wait", "load"): (1, NO_ACTIVATIONS),
    FILLED: (2, QUEUES),
    # Of the four blocks of a run.
    ("bar.warp", "arrive_warp"): (4, PRODUCTS),
    ("wgmma.fence", "__init__"): (1, NEW_REGISTERS),
}
# Behind the launch that quantises: its wait is the first.
STREAMED = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
    ("bar.warp", "arrive_warp"): (4, PRODUCTS),
    ("wgmma.fence", "__init__"): (1, NEW_REGISTERS),
}
# The same in the loop of each of two slices.
SLICES = {**STREAMED, ("bar.warp", "arrive_warp"): (8, PRODUCTS)}
SLICES[("wgmma.fence", "__init__")] = (2, NEW_REGISTERS)
JOINS = {("barrier.cluster", "run"): (1, "these warps touch no other CTA: they take their part")}
CLUSTER = "the barrier of the cluster, which every warp waits for, orders the same"
CLEARED = ("fence.proxy", "clear_missing")
CLEARED_MEET = ("bar.sync", "sync_consumers")
WHOLE = "the first copy into a stage leaves no row out"
STORED = "the fence before a tile's outputs orders the same: only a later tile lacks rows"
UNDER_WAY = "completes loads whose uses ptxas moves behind the arrival: in PTX they come before it"
FENCE = ("fence.acq_rel", "release_to")


def fences(copies: int) -> dict[tuple[str, str, str], tuple[int, str]]:
    """Weaker fences before a release to the cluster."""
    return {(*FENCE, weaker): (copies, UNDER_WAY) for weaker in ("acquire", "release")}


RUNS = (("bar.warp", "arrive_warp"), ("wgmma.fence", "__init__"))
WIDE = {place: STREAMED[place] for place in STREAMED if place not in RUNS}
REDUNDANT = {
    "resident": {**RESIDENT, CLEARED_MEET: (1, BEHIND)},
    "resident_clusters": {**RESIDENT, **JOINS},
    "streamed": {**SLICES, CLEARED: (1, WHOLE), CLEARED_MEET: (1, WHOLE)},
    "streamed_clusters": {**STREAMED, **JOINS, CLEARED_MEET: (1, CLUSTER)},
    "streamed_short": {**SLICES, CLEARED_MEET: (1, BEHIND)},
    # Two slices, and a cluster whose every role waits for all of it.
    "wide": {
        **WIDE,
        FENCE: (2, UNDER_WAY),
        ("bar.sync", "run"): (1, CLUSTER),
        CLEARED: (1, STORED),
    },
    "wide_clusters": {**WIDE, **JOINS, FENCE: (1, UNDER_WAY), CLEARED_MEET: (1, CLUSTER)},
    "wide_short": {**WIDE, FENCE: (2, UNDER_WAY), ("bar.sync", "run"): (1, CLUSTER)},
}

# What no launch runs.
UNREACHED = {"streamed_short": {CLEARED_MEET: (1, "there is one token tile")}}


def make_run(inputs: Inputs, tiling: int, schedule: str) -> Run:
    def check(positional: tuple, keywords: dict) -> None:
        assert_linear_close(positional[4], inputs)

    device = Device("sm_90a", NUM_SMS)
    call = partial(inputs.call, device, tiling=tiling, num_sms=NUM_SMS)
    return run_of(call, check, schedule)


@cache
def kernel(name: str):
    """The compiled kernels, and the launches that must notice a deletion."""
    from dsv4.kernels.gemm.sm90.fp8_linear import build

    chosen = KERNELS[name]
    inputs = Inputs.make(chosen.case, 1)
    runs = [make_run(inputs, chosen.tiling, schedule) for schedule in SCHEDULES[:2]]
    return build(chosen.config, compiler_options("sm_90a", has_lines=True)), runs


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name) -> None:
    check_deleted(*kernel(name), REDUNDANT[name], UNREACHED.get(name))


# What may be weaker, by instruction, the kernel's function and the new qualifier: how many of them,
# and why.
EXPECTS = "the copies it expects complete with a release of their own, and are all it hands over"
PARTS = ("mbarrier.arrive", "expect_parts", "relaxed")


def weights(copies: int) -> dict[tuple[str, str, str], tuple[int, str]]:
    """Arrivals that announce a stage of weights."""
    return {("mbarrier.arrive", "load_weights", "relaxed"): (copies, EXPECTS)}


def filling(rings: int) -> dict[tuple[str, str, str], tuple[int, str]]:
    """Arrivals of the first filling of a ring, or of two, that activations pass through."""
    return {
        ("mbarrier.arrive", "_fill", "relaxed"): (1, EXPECTS),
        # A release is what PTX asks for: it hands over weights that were waited for.
        ("mbarrier.arrive", "_complete", "relaxed"): (
            rings, "in the simulator the copies it expects, issued behind that wait, do so, too",
        ),
    }  # fmt: skip


QUEUE = {(*FILLED, "relaxed"): (2, QUEUES)}
HARMLESS = {
    "resident": {**weights(4), **QUEUE},
    "resident_clusters": {**weights(4), **QUEUE, PARTS: (1, EXPECTS)},
    "streamed": {**weights(2), **filling(1), (*CLEARED, "global"): (1, WHOLE)},
    "streamed_clusters": {**weights(2), **filling(1), PARTS: (1, EXPECTS)},
    "streamed_short": {**weights(2), **filling(1)},
    "wide": {**weights(2), **fences(2), (*CLEARED, "global"): (1, STORED)},
    "wide_clusters": {
        **weights(2),
        PARTS: (1, EXPECTS),
        **fences(1),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, "the fence before it releases"),
    },
    "wide_short": {**weights(2), **fences(2)},
}


@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name) -> None:
    """In one schedule: a weaker qualifier changes nothing but the checker's order."""
    compiled, runs = kernel(name)
    check_weaker(compiled, [run for run in runs if run.schedule == "eager"], HARMLESS[name])
