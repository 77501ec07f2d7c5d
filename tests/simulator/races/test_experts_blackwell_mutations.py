"""Deleting any one synchronisation instruction of Blackwell's experts is noticed."""

from __future__ import annotations

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import subjects
from tests.simulator.helpers.changes import check_deleted
from tests.simulator.races.test_fp8_linear_mutations import FIRST, LAUNCH

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

LISTS = "reads lists alone, which are there before the launches of this test"
LOADED = "what was read of sums is there for the whole warp: its loads end together"
ENDS = "every warp has read its sums, and what follows a barrier of them reads none"
MAXIMA = "every warp has read its sums before the barrier of the last maxima"
PAIR = "these warps do not use the other CTA: the wait is the end of their arrival"

# What is not missed, by instruction and the kernel's function: how many of them, and why.
REDUNDANT = {
    # Of both products and of the sum.
    ("griddepcontrol.launch_dependents", "kernel"): (3, LAUNCH),
    ("griddepcontrol.wait", "load"): (1, FIRST),
    ("griddepcontrol.wait", "fill"): (1, FIRST),
    ("griddepcontrol.wait", "multiply"): (2, LISTS),
    ("griddepcontrol.wait", "store_tiles"): (2, LISTS),
    ("bar.warp", "arrive_warp"): (2, LOADED),
    ("tcgen05.fence::before_thread_sync", "store_tiles"): (2, ENDS),
    ("bar.sync", "store_tiles"): (1, MAXIMA),
    ("barrier.cluster", "kernel"): (1, PAIR),
}


def test_all_deletions_are_noticed() -> None:
    compiled, runs = subjects.blackwell_experts()
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], REDUNDANT)
