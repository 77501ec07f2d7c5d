"""Deleting any one synchronisation instruction of the router that shares a launch with the shared
expert's first product, or weakening any one of its qualifiers by a step, is noticed; and whole
layers behind it give one result, however their launches overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from dsv4.ops.runtime.backend import Device
from dsv4.testing.harness import SCHEDULES, Call, Outcome
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

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Five slices of K, of which a CTA of the gate has two; two tiles of experts; padding.
CASE = Case(3, 2560, 128, 64, 3, live=2)
# Of tokens with codes, of those that the product rounds, and of two sets of the gate's CTAs.
CASES = ((CASE, True), (CASE, False), (replace(CASE, tokens=11, live=10), True))
ROUTER = (
    *("route", "add_logits", "is_last", "arrive", "choose", "select", "take_best", "store"),
    *("gather", "sort_few"),
)
COUNTER = ("atom.global", "__init__")  # the compiler names no function of it
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
# Of three kernels.
REDUNDANT: Listed = {
    ("griddepcontrol.launch_dependents", "route"): (3, LAUNCH),
    ("griddepcontrol.wait", "add_logits"): (3, FIRST),
}


@cache
def inputs(number: int) -> LayerInputs:
    case, has_codes = CASES[number]
    return replace(LayerInputs.make(case, 1), has_codes=has_codes)


@cache
def compiled():
    """A layer with the tiling of one token alone."""
    return hopper_layer(inputs(0), 0)


def make_call(number: int) -> Call:
    return inputs(number).call_tiled(0, Device("sm_90a", 132))


def make_runs(schedule: str) -> list[Run]:
    """Of each case."""

    def check(number: int, found: Outcome) -> None:
        assert_layer_close(found, inputs(number))
        assert not found.scratch["workspace"].any(), "the counter is not 0 again"

    return [
        run_of_call(partial(make_call, number), partial(check, number), schedule)
        for number in range(len(CASES))
    ]


def of_router(changes: list[Change]) -> list[Change]:
    """Those of the launch's router: the product's are those of other launches."""
    found = in_entries(compiled().artifacts.PTX, ["RouterBesideProduct"], changes)
    return [one for one in found if one.place[1] in ROUTER or one.place[:2] == COUNTER]


def test_all_deletions_are_noticed() -> None:
    router = of_router(deletions_of(compiled().artifacts.PTX))
    assert len(router) >= 18, router
    runs = [run for schedule in SCHEDULES[:2] for run in make_runs(schedule)]
    check(compiled(), runs, router, REDUNDANT, {})


def test_all_weaker_qualifiers_are_noticed() -> None:
    """The counters', which every CTA of the gate arrives at, and the last ones of sets."""
    router = of_router(weakenings_of(compiled().artifacts.PTX))
    assert len(router) == 12, router
    check(compiled(), make_runs(SCHEDULES[0]), router, {}, {})


@pytest.mark.parametrize("number", range(len(CASES)), ids=["codes", "rows", "sets"])
@pytest.mark.parametrize("overlap", ["all", "random"])
def test_launches_that_overlap_give_one_result(overlap, number, seed) -> None:
    from dsv4.simulator import simulate

    results = []
    for chosen in ("none", overlap):
        call = make_call(number).poisoned()
        options = {"overlap": chosen, "seed": seed, "races": False}
        report = simulate(compiled(), *call.args, **call.options, **options)
        assert len(report.launches) == 4  # the router's; gate and up; down; the sum
        results.append(Outcome.of(call))
    assert torch.equal(results[0]["out"], results[1]["out"])
