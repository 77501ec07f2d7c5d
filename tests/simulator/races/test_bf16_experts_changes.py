"""Deleting any one synchronisation instruction of Hopper's experts that are multiplied in bf16, or
weakening any one of its qualifiers by a step, is noticed: weights in bf16, the shared expert's too,
and in NVFP4 beside a shared expert in FP8; a launch for each product, and one for both.

The launches before and behind the products have tests of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import experts
from tests.simulator.helpers.changes import (
    Listed,
    check,
    check_deleted,
    check_weaker,
    weakenings_of,
)
from tests.simulator.races.test_deleted_synchronisation import (
    BOARD,
    EXPECTED_LATE,
    FIRST_TILE,
    ZEROS,
    ZEROS_FENCED,
    copies_unreached,
)
from tests.simulator.races.test_fp8_linear_mutations import EXPECTS, LAUNCH
from tests.simulator.races.test_weaker_qualifiers import ALONE

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

ENTRIES = ("Bf16Product", "JointProducts")
NEXT_GROUP = (
    "parts of a stage but the last: their products are then of the next group, and all are waited "
    "for before the stage is released"
)
OWN_REGISTERS = (
    "before the next part's weights are decoded: in PTX each part of a stage has registers of its "
    "own, and all products are waited for before the stage is released"
)
COPIES = (
    "every lane's copies arrive at the stage by themselves, and are all that it has written there: "
    "the warp's arrival behind them hands nothing over"
)
SHOWN = "of a tile on the board, first and further ones: the lane that writes it arrives"
READ_BEFORE = (
    "of a tile that was read from the board, by consumers and, the first one, by those that fill "
    "stages: its place is written again behind the stages of two tiles, for whose room the load "
    "warp has waited, and these warps' arrivals at stages, behind the reading, made it"
)
ONE_STAGE = (
    "down of routed experts, the last tiles, has one stage here, as in BOARD: it is filled again "
    "when the tile behind it was read from the board; in bf16, where it has three, it is noticed"
)
SHOWS_LATER = (
    "lists, and what the launch before leaves: the load warp has waited for that, before it shows "
    "the first tile on the board"
)


class Kernel(NamedTuple):
    """Experts of a type by a tiling, and what goes unnoticed or is never run."""

    dtype: str
    tiling: int
    redundant: Listed
    harmless: Listed
    unreached: Listed | None = None


def apart(commits: int, waits: int, copies: int) -> Listed:
    """Of two launches: gate and up of routed experts; gate and up of the shared one, or down."""
    return {
        ("griddepcontrol.launch_dependents", "take_role"): (2, LAUNCH),
        ("fence.mbarrier_init", "initialise"): (2, ZEROS_FENCED),
        ("fence.proxy", "clear"): (2, ZEROS),
        ("bar.warp", "load_stage"): (4, EXPECTED_LATE),
        ("bar.warp", "arrive_warp"): (copies, COPIES),
        ("wgmma.commit_group", "_add_blocks"): (commits, NEXT_GROUP),
        ("wgmma.wait_group", "_add_blocks"): (waits, OWN_REGISTERS),
    }


def apart_weaker(copies: int) -> Listed:
    return {
        ("fence.proxy", "clear", "global"): (2, ZEROS),
        ("mbarrier.arrive", "load_stage", "relaxed"): (4, EXPECTS),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (copies, COPIES),
    }


def joint(commits: int, waits: int) -> Listed:
    """Of one launch: gate and up, the shared expert's down, the others'."""
    return {
        ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
        ("griddepcontrol.wait", "compute"): (1, SHOWS_LATER),
        ("griddepcontrol.wait", "fill"): (1, SHOWS_LATER),
        ("fence.mbarrier_init", "kernel"): (1, ZEROS_FENCED),
        ("fence.proxy", "clear"): (1, ZEROS),
        ("bar.warp", "load_stage"): (3, EXPECTED_LATE),
        ("mbarrier.try_wait", "_show"): (1, FIRST_TILE),
        ("wgmma.commit_group", "_add_blocks"): (commits, NEXT_GROUP),
        ("wgmma.wait_group", "_add_blocks"): (waits, OWN_REGISTERS),
    }


JOINT_WEAKER = {
    ("fence.proxy", "clear", "global"): (1, ZEROS),
    ("mbarrier.arrive", "load_stage", "relaxed"): (3, EXPECTS),
    ("mbarrier.try_wait", "_show", "relaxed"): (1, FIRST_TILE),
    ("ld.acquire", "_wait_for_h", "relaxed"): (1, ALONE),
    ("ld.acquire", "_wait_for_h", "cluster"): (1, ALONE),
    ("red.release", "_publish_h", "relaxed"): (1, ALONE),
    ("red.release", "_publish_h", "cluster"): (1, ALONE),
}
KERNELS = {
    "bf16": Kernel(
        "bfloat16",
        experts.APART,
        apart(5, 10, copies=5),
        apart_weaker(copies=5),
        copies_unreached(2),
    ),
    "NVFP4": Kernel(
        "nvfp4",
        experts.APART,
        apart(14, 20, copies=4),
        apart_weaker(copies=4),
        copies_unreached(8),
    ),
    "bf16, one launch": Kernel(
        "bfloat16",
        experts.JOINT,
        {
            **joint(3, 6),
            ("bar.warp", "arrive_warp"): (8, f"{SHOWN} (2); {READ_BEFORE} (3); {COPIES} (3)"),
        },
        {
            **JOINT_WEAKER,
            ("mbarrier.arrive", "arrive_warp", "relaxed"): (
                6,
                f"{READ_BEFORE} (3); {COPIES} (3)",
            ),
        },
    ),
    "NVFP4, one launch": Kernel(
        "nvfp4",
        experts.JOINT,
        {
            **joint(12, 14),
            ("mbarrier.try_wait", "load_tile"): (1, BOARD),
            ("mbarrier.try_wait", "_copy_rows"): (1, BOARD),
            ("bar.warp", "arrive_warp"): (5, f"{SHOWN} (2); {COPIES} (2); {ONE_STAGE}"),
        },
        {
            **JOINT_WEAKER,
            ("mbarrier.try_wait", "load_tile", "relaxed"): (1, BOARD),
            ("mbarrier.try_wait", "_copy_rows", "relaxed"): (1, BOARD),
            ("mbarrier.arrive", "arrive_warp", "relaxed"): (3, f"{COPIES} (2); {ONE_STAGE}"),
        },
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    kernel = KERNELS[name]
    compiled, runs = experts.bf16_experts(kernel.dtype, kernel.tiling)
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check_deleted(compiled, all_runs, kernel.redundant, kernel.unreached, ENTRIES)


@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    kernel = KERNELS[name]
    compiled, runs = experts.bf16_experts(kernel.dtype, kernel.tiling)
    check_weaker(compiled, runs("eager"), kernel.harmless, entries=ENTRIES)


@pytest.mark.parametrize("dtype", ["bfloat16", "nvfp4"])
def test_one_launch_hands_h_over_to_all_ctas(dtype: str) -> None:
    """In the schedule in which CTAs share the tiles out: else one takes nearly all of them."""
    compiled, runs = experts.bf16_experts(dtype, experts.JOINT)
    changes = [
        change
        for change in weakenings_of(compiled.artifacts.PTX)
        if change.place[1] in ("_publish_h", "_wait_for_h")
    ]
    assert len(changes) == 4, changes  # release and acquire: semantics and scope
    check(compiled, runs("lazy"), changes, {}, {})
