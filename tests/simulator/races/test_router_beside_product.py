"""Deleting any one synchronisation instruction of the router that shares a launch with the shared
expert's first product is noticed, and of the selection alone that shares one where its warps take
several tokens; and whole layers give one result, however their launches overlap."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch

from dsv4.kernels.moe.plan import tilings
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device
from dsv4.testing.harness import SCHEDULES, Call, Outcome, Simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from tests.simulator.helpers.changes import Listed, check, deletions_of, in_entries
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import run_of_call, subject_of_calls
from tests.simulator.races.test_deleted_synchronisation import ZEROS_FENCED

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Five slices of K, of which a CTA of the gate has two; two tiles of experts; padding.
CASE = Case(3, 2560, 128, 64, 3, live=2)
ROUTER = ("route", "add_logits", "choose", "arrive", "select", "sort_few", "take_best", "store")
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
REDUNDANT: Listed = {
    ("griddepcontrol.launch_dependents", "route"): (1, LAUNCH),
    ("griddepcontrol.wait", "add_logits"): (1, FIRST),
}
# One SM, whose four CTAs of the selection have fewer warps than there are tokens.
MANY = Case(90, 512, 128, 32, 7, live=81)
BESIDE_REDUNDANT: Listed = {
    # Of the selection, and of the product.
    ("griddepcontrol.launch_dependents", "run"): (2, LAUNCH),
    ("fence.mbarrier_init", "run"): (1, ZEROS_FENCED),
}


@cache
def inputs() -> LayerInputs:
    made = LayerInputs.make(CASE, 1)
    return LayerInputs(**{**vars(made), "has_codes": True})


def compiled_with(made: LayerInputs):
    """A layer with the tiling of one token alone."""
    name = "dsv4.kernels.moe.sm90.experts.tilings"
    with mock.patch(name, lambda config: tilings(config)[:1]):
        return OpKernels(MOE, Simulator("sm_90a", has_lines=True)).compile(made.config)


@cache
def compiled():
    return compiled_with(inputs())


def make_call() -> Call:
    return inputs().call_tiled(0, Device("sm_90a", 132))


def make_run(schedule: str) -> Run:
    def check(found: Outcome) -> None:
        assert_layer_close(found, inputs())
        assert not found.scratch["workspace"].any(), "the counter is not 0 again"

    return run_of_call(make_call, check, schedule)


def test_all_deletions_are_noticed() -> None:
    kernel = compiled()
    found = deletions_of(kernel.artifacts.PTX)
    router = [change for change in found if change.place[1] in ROUTER]
    assert len(router) >= 8, router
    runs = [make_run(schedule) for schedule in SCHEDULES[:2]]
    check(kernel, runs, router, REDUNDANT, {})


def test_all_deletions_are_noticed_where_warps_select_for_several_tokens() -> None:
    """In the function that sends warps to their tokens; the others are those of the router."""
    made = LayerInputs.make(MANY, 1)
    kernel, runs = subject_of_calls(
        compiled_with(made),
        [lambda: made.call_tiled(0, Device("sm_90a", 1))],
        lambda found: assert_layer_close(found, made),
    )
    ptx = kernel.artifacts.PTX
    found = in_entries(ptx, ["ProductBesideSelection"], deletions_of(ptx))
    changes = [change for change in found if change.place[1] == "run"]
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check(kernel, all_runs, changes, BESIDE_REDUNDANT, {})


@pytest.mark.parametrize("overlap", ["all", "random"])
def test_launches_that_overlap_give_one_result(overlap, seed) -> None:
    from dsv4.simulator import simulate

    results = []
    for chosen in ("none", overlap):
        call = make_call().poisoned()
        options = {"overlap": chosen, "seed": seed, "races": False}
        report = simulate(compiled(), *call.args, **call.options, **options)
        assert len(report.launches) == 4  # the router's; gate and up; down; the sum
        results.append(Outcome.of(call))
    assert torch.equal(results[0]["out"], results[1]["out"])
