"""Deleting any one synchronisation instruction of a kernel is noticed: linears with code of their
own, and the compressor.

The bodies of FP8 weights are those of `fp8_linear`, whose deletions have a test of their own.
"""

from __future__ import annotations

from functools import partial

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import subjects
from tests.simulator.helpers.changes import check_deleted

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
NO_ACTIVATIONS = "this warp loads weights alone, which no launch writes"
PRODUCTS = "what was read of a stage was read by products, which the whole warpgroup has waited for"
TURN = "gives the warpgroups turns at the tensor cores: their order changes no product"
CLUSTER = "the barrier of the cluster, which every warp waits for, orders the same"


def resident(releases: int) -> dict[tuple[str, str], tuple[int, str]]:
    """Kernels whose consumers round activations themselves."""
    return {
        ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
        ("griddepcontrol.wait", "compute"): (1, FIRST),
        ("griddepcontrol.wait", "load"): (1, NO_ACTIVATIONS),
        ("bar.warp", "arrive_warp"): (releases, PRODUCTS),
    }


def streamed(releases: int) -> dict[tuple[str, str], tuple[int, str]]:
    """Kernels behind the launch that rounds activations: its wait is the first."""
    return {
        ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
        ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
        ("griddepcontrol.wait", "kernel"): (1, FIRST),
        ("bar.warp", "arrive_warp"): (releases, PRODUCTS),
    }


# In the loop of each of two slices.
GROUPED_WIDE = {
    **streamed(2),
    ("bar.warp", "arrive_warp"): (2, TURN),
    ("wgmma.commit_group", "_sum_slice"): (2, TURN),
    ("wgmma.wait_group", "_sum_slice"): (2, TURN),
    ("bar.sync", "run"): (1, CLUSTER),
}
PLAIN_WIDE = {
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "load"): (1, FIRST),
    # In the loop of each of two slices, and behind it.
    ("bar.warp", "release_to"): (4, PRODUCTS),
    ("bar.sync", "run"): (1, CLUSTER),
}
MERGED_WIDE = {
    **GROUPED_WIDE,
    **PLAIN_WIDE,
    ("griddepcontrol.launch_dependents", "run"): (2, LAUNCH),
    ("bar.sync", "run"): (2, CLUSTER),
}
COMPRESSOR = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "run"): (1, FIRST),
}

# Subject, and what is not missed: by instruction and the kernel's function, how many of them, and
# why.
KERNELS = {
    # A slice's blocks but the last, and the last one.
    "plain linear, resident": (partial(subjects.plain, 11, 0), resident(2)),
    "plain linear, wide": (partial(subjects.plain, 150, -1), PLAIN_WIDE),
    "grouped linear, resident": (partial(subjects.grouped, 11, 0), resident(1)),
    "grouped linear, streamed": (partial(subjects.grouped, 21, 1), streamed(1)),
    "grouped linear, wide": (partial(subjects.grouped, 67, -1), GROUPED_WIDE),
    "merged linear, wide": (partial(subjects.merged, 150, -1), MERGED_WIDE),
    "rotated linear, streamed": (partial(subjects.rotated, 19, 1), streamed(2)),
    "compressor, Hopper": (partial(subjects.compressor, "sm_90a"), COMPRESSOR),
    "compressor, Blackwell": (partial(subjects.compressor, "sm_100a"), COMPRESSOR),
}


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    make, redundant = KERNELS[name]
    compiled, runs = make()
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], redundant)
