"""Deleting any one synchronisation instruction of the router that shares a launch with the shared
expert's first product is noticed; and whole layers behind it give one result, however their
launches overlap."""

from __future__ import annotations

from collections import Counter
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
from tests.simulator.helpers.mutations import (
    Run,
    known_warnings,
    noticed,
    simulate_text,
    sync_instructions,
    without,
)
from tests.simulator.helpers.places import places
from tests.simulator.helpers.subjects import run_of_call
from tests.simulator.races.test_fp8_linear_mutations import reached

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Five slices of K, of which a CTA of the gate has two; two tiles of experts; padding.
CASE = Case(3, 2560, 128, 64, 3, live=2)
ROUTER = ("route", "add_logits", "choose", "arrive", "select", "sort_few", "take_best", "store")
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
REDUNDANT: dict[tuple[str, str], tuple[int, str]] = {
    ("griddepcontrol.launch_dependents", "route"): (1, LAUNCH),
    ("griddepcontrol.wait", "add_logits"): (1, FIRST),
}


@cache
def inputs() -> LayerInputs:
    made = LayerInputs.make(CASE, 1)
    return LayerInputs(**{**vars(made), "has_codes": True})


@cache
def compiled():
    """A layer with the tiling of one token alone."""
    name = "dsv4.kernels.moe.sm90.experts.tilings"
    with mock.patch(name, lambda config: tilings(config)[:1]):
        return OpKernels(MOE, Simulator("sm_90a", has_lines=True)).compile(inputs().config)


def make_call() -> Call:
    return inputs().call_tiled(0, Device("sm_90a", 132))


def make_run(schedule: str) -> Run:
    def check(found: Outcome) -> None:
        assert_layer_close(found, inputs())
        assert not found.scratch["workspace"].any(), "the counter is not 0 again"

    return run_of_call(make_call, check, schedule)


def test_all_deletions_are_noticed() -> None:
    kernel = compiled()
    ptx, runs = kernel.artifacts.PTX, [make_run(schedule) for schedule in SCHEDULES[:2]]
    known = known_warnings(kernel, runs)
    report, _ = simulate_text(kernel, ptx, runs[0])
    never = {place for found in report.coverage for place in found.missed_sync}
    instructions = [
        ins for ins in reached(report, sync_instructions(ptx), ptx) if ins.where() not in never
    ]
    router = [
        (ins, place) for ins, place in zip(instructions, places(instructions))
        if place[1] in ROUTER
    ]  # fmt: skip
    assert len(router) >= 8, router
    missed = [
        (ins, place) for ins, place in router if not noticed(kernel, without(ptx, ins), runs, known)
    ]
    expected = {place: count for place, (count, _) in REDUNDANT.items()}
    found = Counter(place for _, place in missed)
    assert found == expected, "\n".join(f"{place} {ins.where()}" for ins, place in missed)


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
