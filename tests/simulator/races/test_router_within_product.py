"""Deleting any one synchronisation instruction of the router whose warps are those of the shared
expert's first product, too, or weakening any one of its qualifiers by a step, is noticed; and whole
layers behind it give one result, however their launches overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from dsv4.ops.runtime.backend import Device
from dsv4.testing.harness import Call, Outcome
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from tests.simulator.helpers.changes import (
    Change,
    Listed,
    check,
    deletions_of,
    in_entries,
    weakenings_of,
)
from tests.simulator.helpers.experts import hopper_layer
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import run_of_call
from tests.simulator.races.test_router_beside_product import COUNTER

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Three slices of K of two tiles of experts: two turns of some CTAs; tokens of two steps; padding.
CASE = Case(19, 1536, 128, 64, 3, live=18)
TILING, SMS = 2, 5
ROUTER = (
    *("kernel", "route", "add_logits", "multiply", "meet", "arrive", "choose", "select"),
    *("take_best", "store", "sort_some", "exclusive_sums", "live_count"),
)
REDUNDANT: Listed = {
    ("griddepcontrol.wait", "add_logits"): (
        1,
        "orders a launch after the one before it, and each run here begins with this one",
    ),
    ("red.relaxed", "add_logits"): (
        1,
        "work, not order: CTAs that do not see the others begin leave their tokens to the last one",
    ),
}
# No CTA waits for another one; and they do.
SCHEDULES = ("eager", "random")


@cache
def inputs() -> LayerInputs:
    return replace(LayerInputs.make(CASE, 1), has_codes=True)


@cache
def compiled():
    """A layer with one tiling alone."""
    return hopper_layer(inputs(), TILING)


def make_call() -> Call:
    call = inputs().call_tiled(TILING, Device("sm_90a", SMS))
    # The tiling is the only one that is compiled.
    call.options.update(tiling=0)
    return call


def make_runs() -> list[Run]:
    def checked(found: Outcome) -> None:
        assert_layer_close(found, inputs())
        assert not found.scratch["workspace"].any(), "the counters are not 0 again"

    return [run_of_call(make_call, checked, schedule) for schedule in SCHEDULES]


def of_router(changes: list[Change]) -> list[Change]:
    """Those of the launch's router: the product's are those of other launches."""
    found = in_entries(compiled().artifacts.PTX, ["RouterWithinProduct"], changes)
    return [one for one in found if one.place[1] in ROUTER or one.place[:2] == COUNTER]


def test_all_deletions_are_noticed() -> None:
    router = of_router(deletions_of(compiled().artifacts.PTX))
    assert len(router) >= 14, router
    check(compiled(), make_runs(), router, REDUNDANT, {})


def test_all_weaker_qualifiers_are_noticed() -> None:
    """The counters', which every CTA arrives at."""
    router = of_router(weakenings_of(compiled().artifacts.PTX))
    assert len(router) == 10, router
    check(compiled(), make_runs(), router, {}, {})


@pytest.mark.parametrize("overlap", ["all", "random"])
def test_launches_that_overlap_give_one_result(overlap, seed) -> None:
    from dsv4.simulator import simulate

    results = []
    for chosen in ("none", overlap):
        call = make_call().poisoned()
        options = {"overlap": chosen, "seed": seed, "races": False}
        report = simulate(compiled(), *call.args, **call.options, **options)
        assert len(report.launches) == 3  # the router's; both products; the sum
        results.append(Outcome.of(call))
    assert torch.equal(results[0]["out"], results[1]["out"])
