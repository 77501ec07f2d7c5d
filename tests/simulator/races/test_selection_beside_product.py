"""Deleting any one synchronisation instruction of the selection that shares a launch with the
shared expert's first product is noticed, where warps choose for several tokens."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest

from dsv4.kernels.moe.plan import tilings
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device
from dsv4.testing.harness import SCHEDULES, Call, Outcome, Simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from tests.simulator.helpers.changes import Listed, check, deletions_of, in_entries
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import run_of_call
from tests.simulator.races.test_router_mutations import BARRIER, LAST, LAUNCH

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Four CTAs of eight warps, some of which have two tokens; padding.
TILING, CASE = 2, Case(40, 512, 128, 32, 3, live=38)
FEW_SMS = 2
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


@cache
def inputs() -> LayerInputs:
    return LayerInputs.make(CASE, 1)


@cache
def compiled():
    """A layer with one tiling alone; further loads of a thread are copies of an unrolled loop."""
    moe = "dsv4.kernels.moe"
    chosen = mock.patch(f"{moe}.sm90.experts.tilings", lambda config: tilings(config)[TILING:][:1])
    with chosen, mock.patch(f"{moe}.select.BATCH", 1):
        return OpKernels(MOE, Simulator("sm_90a", has_lines=True)).compile(inputs().config)


def make_call() -> Call:
    return inputs().call_tiled(0, Device("sm_90a", FEW_SMS))


def make_run(schedule: str) -> Run:
    def check(found: Outcome) -> None:
        assert_layer_close(found, inputs())

    return run_of_call(make_call, check, schedule)


def test_all_deletions_are_noticed() -> None:
    kernel = compiled()
    ptx = kernel.artifacts.PTX
    found = in_entries(ptx, ["ProductBesideSelection"], deletions_of(ptx))
    selection = [change for change in found if SELECTION in str(change)]
    runs = [make_run(schedule) for schedule in SCHEDULES[:2]]
    check(kernel, runs, selection, REDUNDANT, UNREACHED)
