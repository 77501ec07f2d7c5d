"""Deleting any one synchronisation instruction of Hopper's experts of many tokens, or weakening any
one of its qualifiers by a step, is noticed: FP4, with one scale a row and raw, and FP8 beside a
shared expert in FP8, tokens of a tile for one CTA or for two of a cluster."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import experts
from tests.simulator.helpers.changes import (
    Listed,
    check_deleted,
    check_weaker,
    deletions_of,
    weakenings_of,
)
from tests.simulator.races.test_fp8_linear_mutations import (
    CLUSTER,
    EXPECTS,
    FENCE,
    FIRST,
    LAUNCH,
    UNDER_WAY,
    fences,
)

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

BEHIND_RING = (
    "of down: reads lists, which no launch here writes; its outputs come behind the ring, whose "
    "load warps wait"
)
BEGUN = (
    "the first one tells that the other CTA has begun, and of its mbarriers: with their fence, a "
    "relaxed arrival is enough for both"
)
FENCED = "behind the fence, which releases as much"
# What is not missed, and what may be weaker: by instruction, the kernel's function and the new
# qualifier, how many of them, and why.
DELETED = {
    # Of tokens gathered, both products, h rounded, the sum over experts.
    ("griddepcontrol.launch_dependents", "kernel"): (5, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, f"of tokens gathered: {FIRST}"),
    ("griddepcontrol.wait", "compute"): (1, BEHIND_RING),
    # The last stage of routed and of shared tiles of both products, as below.
    FENCE: (4, UNDER_WAY),
}
# Of the products alone: the other launches are those of FP4.
PRODUCTS_DELETED = {
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "compute"): (1, BEHIND_RING),
    FENCE: (4, UNDER_WAY),
}
SHARED_DELETED = {("bar.sync", "kernel"): (2, CLUSTER)}
WEAKER = {("mbarrier.arrive", "_load", "relaxed"): (4, EXPECTS), **fences(4)}
ALONE_WEAKER = {**WEAKER, ("mbarrier.arrive", "arrive_warp", "relaxed"): (4, FENCED)}
SHARED_WEAKER = {**WEAKER, ("barrier.cluster", "kernel", "relaxed"): (2, BEGUN)}


class Kernel(NamedTuple):
    """Experts, how many CTAs share a tile's tokens, and what goes unnoticed.

    Attributes:
        products: whether changes are those of the products alone.
    """

    dtype: str
    sharing: int
    redundant: Listed
    harmless: Listed
    spread: int = experts.WIDE_EXPERTS.spread
    is_row_packed: bool = False
    products: bool = True

    def compiled(self) -> experts.Subject:
        return experts.wide_experts(self.dtype, self.sharing, self.spread, self.is_row_packed)

    @property
    def entries(self) -> list[str]:
        """Of the launches that this one has lists for."""
        return ["WideProduct"] if self.products else [""]


PRODUCTS_SHARED = {**PRODUCTS_DELETED, **SHARED_DELETED}
KERNELS = {
    "alone": Kernel("fp4", 1, DELETED, ALONE_WEAKER, products=False),
    "shared": Kernel("fp4", 2, {**DELETED, **SHARED_DELETED}, SHARED_WEAKER, products=False),
    "row's scale, alone": Kernel("fp4", 1, PRODUCTS_DELETED, ALONE_WEAKER, is_row_packed=True),
    "row's scale, shared": Kernel("fp4", 2, PRODUCTS_SHARED, SHARED_WEAKER, is_row_packed=True),
    "raw, alone": Kernel("fp4", 1, PRODUCTS_DELETED, ALONE_WEAKER, experts.RAW),
    "raw, shared": Kernel("fp4", 2, PRODUCTS_SHARED, SHARED_WEAKER, experts.RAW),
    "FP8, alone": Kernel("fp8", 1, PRODUCTS_DELETED, ALONE_WEAKER),
    "FP8, shared": Kernel("fp8", 2, PRODUCTS_SHARED, SHARED_WEAKER),
}


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    kernel = KERNELS[name]
    compiled, runs = kernel.compiled()
    all_runs = [run for schedule in SCHEDULES[:2] for run in runs(schedule)]
    check_deleted(compiled, all_runs, kernel.redundant, entries=kernel.entries)


@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    kernel = KERNELS[name]
    compiled, runs = kernel.compiled()
    check_weaker(compiled, runs("eager"), kernel.harmless, entries=kernel.entries)


def test_two_ctas_an_sm_have_the_places_of_one() -> None:
    """What is noticed of one is noticed of tiles of up to 32 tokens, too."""
    subjects = [experts.wide_experts("fp4", 1, ctas_per_sm=ctas) for ctas in (1, 2)]
    for changes_of in (deletions_of, weakenings_of):
        one, two = (
            [change.place for change in changes_of(subject.compiled.artifacts.PTX)]
            for subject in subjects
        )
        assert one and one == two
