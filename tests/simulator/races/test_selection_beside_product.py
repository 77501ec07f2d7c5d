"""Deleting any one synchronisation instruction of the selection that shares a launch with the
shared expert's first product, or weakening any one of its qualifiers by a step, is noticed, where
warps choose for several tokens."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest

from dsv4.testing.harness import SCHEDULES
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs
from tests.simulator.helpers.changes import (
    Change,
    Listed,
    check,
    deletions_of,
    in_entries,
    weakenings_of,
)
from tests.simulator.helpers.experts import hopper_layer, runs_of_layer
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import FEW_SMS, SEED
from tests.simulator.races.test_router_beside_product import COUNTER
from tests.simulator.races.test_router_mutations import BARRIER, LAST, LAUNCH

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

# Four CTAs of eight warps, some of which have two tokens; padding.
TILING, CASE = 2, Case(40, 512, 128, 32, 3, live=38)
SELECTION = ("kernels/moe/select.py", "kernels/moe/team.py")
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
    return LayerInputs.make(CASE, SEED)


@cache
def compiled():
    """Further loads of a thread are copies of an unrolled loop."""
    with mock.patch("dsv4.kernels.moe.select.BATCH", 1):
        return hopper_layer(inputs(), TILING)


def of_selection(changes: list[Change]) -> list[Change]:
    """Those of the launch's selection: the product's are those of other launches."""
    found = in_entries(compiled().artifacts.PTX, ["ProductBesideSelection"], changes)
    own = [one for one in found if any(file in str(one) for file in SELECTION)]
    return own + [one for one in found if one.place[:2] == COUNTER]


def runs_of(schedule: str) -> list[Run]:
    return runs_of_layer(inputs(), "sm_90a", [(CASE.tokens, FEW_SMS)], schedule)


def test_all_deletions_are_noticed() -> None:
    selection = of_selection(deletions_of(compiled().artifacts.PTX))
    runs = [run for schedule in SCHEDULES[:2] for run in runs_of(schedule)]
    check(compiled(), runs, selection, REDUNDANT, UNREACHED)


def test_all_weaker_qualifiers_are_noticed() -> None:
    """The counter's, which every CTA of the gate arrives at."""
    selection = of_selection(weakenings_of(compiled().artifacts.PTX))
    assert len(selection) == 3, selection
    check(compiled(), runs_of(SCHEDULES[0]), selection, {}, {})
