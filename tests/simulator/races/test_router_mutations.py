"""Deleting any one synchronisation instruction of the router is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from dsv4.testing.harness import SCHEDULES, Outcome, compiler_options
from dsv4.testing.moe_router import RouterInputs, assert_routed
from tests.simulator.helpers.experts import ROUTER as CASE
from tests.simulator.helpers.experts import ROUTER_TILING as TILING
from tests.simulator.helpers.mutations import (
    Run,
    known_warnings,
    noticed,
    simulate_text,
    sync_instructions,
    without,
)
from tests.simulator.helpers.places import places
from tests.simulator.races.test_fp8_linear_mutations import reached

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# What is not missed, by instruction and the kernel's function: how many of them, and why.
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
FIRST = "orders a launch after the one before it, and each run here begins with this one"
BARRIER = "the CTA's barrier follows: a run of pairs has one batch here"
LAST = "no lane reads the places of a warp after its last batch"
REDUNDANT: dict[tuple[str, str], tuple[int, str]] = {
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
    ("bar.warp", "count_pairs"): (1, BARRIER),
    ("bar.warp", "next_place"): (1, LAST),
}


def make_run(inputs: RouterInputs, schedule: str) -> Run:
    calls = []

    def prepare() -> tuple[tuple, dict]:
        calls.append(inputs.call(TILING).poisoned())
        return calls[-1].args, dict(calls[-1].options)

    def correct(positional: tuple, keywords: dict) -> bool:
        try:
            assert_routed(Outcome.of(calls[-1]), inputs)
        except AssertionError:
            return False
        return True

    return Run(prepare, correct, schedule)


def test_all_deletions_are_noticed() -> None:
    from dsv4.kernels.moe.router import build

    inputs = RouterInputs.make(CASE, 1)
    compiled = build(CASE.config, compiler_options("sm_90a", has_lines=True))
    runs = [make_run(inputs, schedule) for schedule in SCHEDULES[:2]]
    ptx = compiled.artifacts.PTX
    known = known_warnings(compiled, runs)
    report, _ = simulate_text(compiled, ptx, runs[0])
    never = {place for found in report.coverage for place in found.missed_sync}
    instructions = [
        ins for ins in reached(report, sync_instructions(ptx), ptx) if ins.where() not in never
    ]
    missed = [
        (ins, place)
        for ins, place in zip(instructions, places(instructions))
        if not noticed(compiled, without(ptx, ins), runs, known)
    ]
    expected = {place: count for place, (count, _) in REDUNDANT.items()}
    found = Counter(place for _, place in missed)
    assert found == expected, "\n".join(ins.where() for ins, _ in missed)
