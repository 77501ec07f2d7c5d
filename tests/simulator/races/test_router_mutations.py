"""Deleting any one synchronisation instruction of the router is noticed."""

from __future__ import annotations

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import experts
from tests.simulator.helpers.changes import Listed, check_deleted

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# What is not missed, by instruction and the kernel's function: how many of them, and why.
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
BARRIER = "of a warp's last batch: the CTA's barrier follows"
LAST = "no lane reads the places of a warp after its last batch"
REDUNDANT: Listed = {
    # Of the gate, and of the selection.
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
    ("bar.warp", "count_pairs"): (1, BARRIER),
    ("bar.warp", "next_place"): (1, LAST),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_all_deletions_are_noticed(arch: str) -> None:
    compiled, runs = experts.router(arch)
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], REDUNDANT)
