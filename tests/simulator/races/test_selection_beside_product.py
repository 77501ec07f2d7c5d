"""Deleting any one synchronisation instruction of the selection that shares a launch with the
shared expert's first product is noticed, where warps choose for several tokens."""

from __future__ import annotations

from unittest import mock

import pytest

from dsv4.testing.harness import SCHEDULES
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs
from tests.simulator.helpers.changes import Listed, check, deletions_of, in_entries
from tests.simulator.helpers.experts import hopper_layer, runs_of_layer
from tests.simulator.helpers.subjects import FEW_SMS, SEED
from tests.simulator.races.test_router_mutations import BARRIER, LAST, LAUNCH

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Four CTAs of eight warps, some of which have two tokens; padding.
TILING, CASE = 2, Case(40, 512, 128, 32, 3, live=38)
SELECTION = "kernels/moe/select.py"
REDUNDANT: Listed = {
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("bar.warp", "count_pairs"): (1, BARRIER),
    ("bar.warp", "next_place"): (1, LAST),
}
ONE_BATCH = "of a warp's further pairs: here one batch has them; test_router_mutations has two"
ONE_CTA = "of tokens that one CTA has: here there are four; test_router_mutations has such a launch"
UNREACHED: Listed = {
    ("bar.sync", "sort_few"): (1, ONE_CTA),
    ("bar.warp", "count_pairs"): (1, ONE_BATCH),
    ("bar.warp", "next_place"): (2, ONE_BATCH),
}


def test_all_deletions_are_noticed() -> None:
    inputs = LayerInputs.make(CASE, SEED)
    # Further loads of a thread are copies of an unrolled loop.
    with mock.patch("dsv4.kernels.moe.select.BATCH", 1):
        compiled = hopper_layer(inputs, TILING)
    ptx, launches = compiled.artifacts.PTX, [(CASE.tokens, FEW_SMS)]
    found = in_entries(ptx, ["ProductBesideSelection"], deletions_of(ptx))
    selection = [change for change in found if SELECTION in str(change)]
    runs = [run for s in SCHEDULES[:2] for run in runs_of_layer(inputs, "sm_90a", launches, s)]
    check(compiled, runs, selection, REDUNDANT, UNREACHED)
