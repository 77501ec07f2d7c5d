"""Deleting any one synchronisation instruction of a kernel is noticed: linears with code of their
own, and the compressor.

The bodies of FP8 weights are those of `fp8_linear`, whose deletions have a test of their own.
"""

from __future__ import annotations

from functools import partial

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import subjects
from tests.simulator.helpers.changes import Listed, check_deleted
from tests.simulator.races.test_fp8_linear_mutations import (
    CLUSTER,
    FIRST,
    LAUNCH,
    PRODUCTS,
    RESIDENT,
    STREAMED,
    TURN,
)

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")


def releasing(kernel: Listed, releases: int) -> Listed:
    """A kernel's list, with so many releases of stages."""
    return {**kernel, ("bar.warp", "arrive_warp"): (releases, PRODUCTS)}


# In the loop of each of two slices.
GROUPED_WIDE = {
    **STREAMED,
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
    "plain linear, resident": (partial(subjects.plain, 11, 0), releasing(RESIDENT, 2)),
    "plain linear, wide": (partial(subjects.plain, 150, -1), PLAIN_WIDE),
    "grouped linear, resident": (partial(subjects.grouped, 11, 0), RESIDENT),
    "grouped linear, streamed": (partial(subjects.grouped, 21, 1), STREAMED),
    "grouped linear, wide": (partial(subjects.grouped, 67, -1), GROUPED_WIDE),
    "merged linear, wide": (partial(subjects.merged, 150, -1), MERGED_WIDE),
    "rotated linear, streamed": (partial(subjects.rotated, 19, 1), releasing(STREAMED, 4)),
    "compressor, Hopper": (partial(subjects.compressor, "sm_90a"), COMPRESSOR),
    "compressor, Blackwell": (partial(subjects.compressor, "sm_100a"), COMPRESSOR),
}


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    make, redundant = KERNELS[name]
    compiled, runs = make()
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], redundant)
