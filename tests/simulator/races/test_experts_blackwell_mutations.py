"""Deleting any one synchronisation instruction of Blackwell's experts, or weakening any one of its
qualifiers by a step, is noticed."""

from __future__ import annotations

from functools import partial

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import experts
from tests.simulator.helpers.changes import check_deleted, check_weaker
from tests.simulator.races.test_fp8_linear_mutations import EXPECTS, FIRST, LAUNCH

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

LISTS = "reads lists alone, which are there before the launches of this test"
LOADED = "what was read of sums is there for the whole warp: its loads end together"
ENDS = "every warp has read its sums, and what follows a barrier of them reads none"
MAXIMA = "every warp has read its sums before the barrier of the last maxima"
PAIR = "these warps do not use the other CTA: the wait is the end of their arrival"

# What is not missed, by instruction and the kernel's function: how many of them, and why.
REDUNDANT = {
    # Of both products and of the sum.
    ("griddepcontrol.launch_dependents", "kernel"): (3, LAUNCH),
    ("griddepcontrol.wait", "load"): (1, FIRST),
    ("griddepcontrol.wait", "fill"): (1, FIRST),
    ("griddepcontrol.wait", "multiply"): (2, LISTS),
    ("griddepcontrol.wait", "store_tiles"): (2, LISTS),
    ("bar.warp", "arrive_warp"): (2, LOADED),
    ("tcgen05.fence::before_thread_sync", "store_tiles"): (2, ENDS),
    ("bar.sync", "store_tiles"): (1, MAXIMA),
    ("barrier.cluster", "kernel"): (1, PAIR),
}
# fp32 scales: sums of blocks are added up in registers, behind a wait of their own.
IN_REGISTERS = "of tilings whose sums come from Tensor Memory: these are in registers"
SCALED_REDUNDANT = {
    **REDUNDANT,
    ("tcgen05.wait::ld", "_send"): (1, IN_REGISTERS),
    ("tcgen05.wait::ld", "_store_chunk"): (2, IN_REGISTERS),
    ("tcgen05.wait::ld", "store_tile"): (1, IN_REGISTERS),
}
# Of both products of NVFP4, which read what the router's launches have left.
PACKED_REDUNDANT = {
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("bar.warp", "arrive_warp"): (2, LOADED),
    ("tcgen05.fence::before_thread_sync", "store_tiles"): (2, ENDS),
    ("barrier.cluster", "kernel"): (1, PAIR),
}
# What may be weaker, likewise, by the new qualifier.
HARMLESS = {
    # Routed and shared experts' weights, in the copies of both products' loops.
    ("mbarrier.arrive", "_load_weights", "relaxed"): (12, EXPECTS),
    ("mbarrier.arrive", "_store", "relaxed"): (1, f"sums of up: {EXPECTS}"),
}
# In more copies of the loops.
PACKED_HARMLESS = {**HARMLESS, ("mbarrier.arrive", "_load_weights", "relaxed"): (14, EXPECTS)}


# Subject, and deletions that are not missed. All but one have the tiling of few tokens.
KERNELS = {
    "fp4": (experts.blackwell_experts, REDUNDANT),
    "fp4, many tokens": (partial(experts.blackwell_experts, tiling=1), REDUNDANT),
    "fp8": (partial(experts.blackwell_experts, "fp8"), REDUNDANT),
    "fp8, fp32 scales": (
        partial(experts.blackwell_experts, "fp8", "float32"), SCALED_REDUNDANT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    make, redundant = KERNELS[name]
    compiled, runs = make()
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], redundant)


@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    compiled, runs = KERNELS[name][0]()
    check_weaker(compiled, runs("eager"), HARMLESS)


def test_all_deletions_in_products_of_nvfp4_are_noticed() -> None:
    """The router's are the matter of its own test."""
    compiled, runs = experts.packed_experts()
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check_deleted(compiled, all_runs, PACKED_REDUNDANT, entries=["GroupedProduct"])


def test_all_weaker_qualifiers_in_products_of_nvfp4_are_noticed() -> None:
    compiled, runs = experts.packed_experts()
    check_weaker(compiled, runs("eager"), PACKED_HARMLESS, entries=["GroupedProduct"])
