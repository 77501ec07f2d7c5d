"""Weakening any one qualifier of a kernel by a step is noticed: experts, router, linears, seam,
compressor, sampler, and kernels that have none.

A weaker qualifier changes nothing but the checker's order, which is that of one schedule but for
waits that follow a test: which of the two acquires depends on the schedule.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dsv4.testing import kv_insert, rms_norm_fp8
from dsv4.testing.harness import compiler_options
from tests.simulator.helpers import experts, linears, subjects
from tests.simulator.helpers.changes import check, check_weaker, weakenings_of
from tests.simulator.races.test_deleted_synchronisation import (
    BOARD,
    FIRST_TILE,
    READ_EARLIER,
    ZEROS,
)
from tests.simulator.races.test_fp8_linear_mutations import QUEUE, fences, filling

pytestmark = pytest.mark.stage("simulator")

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

EXPECTS = "the copies it expects complete with a release of their own, and are all it hands over"


# ---- experts and router --------------------------------------------------------------------------
EXPERTS_HARMLESS = {
    ("mbarrier.arrive", "load_stage", "relaxed"): (6, EXPECTS),
    ("fence.proxy", "clear", "global"): (
        3,
        "zeros: the CTA's barrier tells every warp of them, and the fence behind a stage's codes, "
        "before the stage is handed over, is for all that its warp knows of",
    ),
}
ALONE = "one CTA takes nearly all tiles: noticed where they share them out, in a test of its own"
JOINT_HARMLESS = {
    ("mbarrier.arrive", "load_stage", "relaxed"): (5, EXPECTS),
    ("fence.proxy", "clear", "global"): (2, ZEROS),
    ("mbarrier.try_wait", "_show", "relaxed"): (1, FIRST_TILE),
    ("mbarrier.try_wait", "load_tile", "relaxed"): (1, BOARD),
    ("mbarrier.try_wait", "_copy", "relaxed"): (1, BOARD),
    ("ld.acquire", "_wait_for_h", "relaxed"): (1, ALONE),
    ("ld.acquire", "_wait_for_h", "cluster"): (1, ALONE),
    ("red.release", "_publish_h", "relaxed"): (1, ALONE),
    ("red.release", "_publish_h", "cluster"): (1, ALONE),
}
# The load warp goes round the ring, with tall tiles and in FP8.
TALL_HARMLESS = {
    place: reason
    for place, reason in JOINT_HARMLESS.items()
    if place[:2] not in (("mbarrier.try_wait", "load_tile"), ("mbarrier.try_wait", "_copy"))
}
FP8_JOINT_HARMLESS = {
    **TALL_HARMLESS,
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (2, READ_EARLIER),
}


# ---- linears, seam -------------------------------------------------------------------------------
def weights(copies: int) -> dict[tuple[str, str, str], tuple[int, str]]:
    """Arrivals that announce a stage of weights."""
    return {("mbarrier.arrive", "load_weights", "relaxed"): (copies, EXPECTS)}


GROUPED_STREAMED_HARMLESS = {
    **weights(2),
    **filling(1),
    ("mbarrier.arrive", "expect_parts", "relaxed"): (1, EXPECTS),
}
# Weights in bf16.
PLAIN_RESIDENT_HARMLESS = {**weights(4), **filling(2)}
# Two for each number of tokens a pass: streams, and what the mixture sends.
SEAM_HARMLESS = {
    ("mbarrier.arrive", "expect", "relaxed"): (6, EXPECTS),
    ("ld.relaxed", "__init__", "cluster"): (
        1,
        "of the CTAs that left their tokens: the last arrival has acquired their words",
    ),
    ("ld.relaxed", "load_words", "cluster"): (
        44,
        "comb, which no thread of the launch writes: strong in order to pass L1",
    ),
}
SEAM_UNREACHED = {("red.relaxed", "meet", "cluster"): (1, "no CTA leaves its tokens here")}
BEST_ROWS_HARMLESS = {
    ("ld.relaxed", "write_rows", "cluster"): (
        1,
        "a key, which the last CTA reads: the counter's atomic has acquired every maximum",
    ),
}
BEGUN = "tells that the other CTAs have begun: there is nothing yet to hand over"
OF_ONE_CTA = "words of one CTA: any scope is enough"
SAMPLER_HARMLESS = {("barrier.cluster", "kernel", "relaxed"): (1, BEGUN)}
SAMPLER_CUTS_HARMLESS = {
    **SAMPLER_HARMLESS,
    ("atom.shared", "__init__", "cluster"): (4, OF_ONE_CTA),
}
ROUTER_HARMLESS = {("atom.shared", "__init__", "cluster"): (1, OF_ONE_CTA)}
ROUTER_MANY_HARMLESS = {
    ("barrier.cluster", "kernel", "relaxed"): (
        1,
        "tells that the other CTA has begun, and of its mbarriers: with their fence, a relaxed "
        "arrival is enough for both",
    ),
    ("mbarrier.arrive", "load", "relaxed"): (1, EXPECTS),
    **fences(4),
    ("atom.shared", "__init__", "cluster"): (1, OF_ONE_CTA),
}

# Subject, what goes unnoticed, and what no launch runs.
KERNELS = {
    "experts": (experts.experts, EXPERTS_HARMLESS, {}),
    "experts, FP8": (partial(experts.experts, dtype="fp8"), EXPERTS_HARMLESS, {}),
    "experts, raw FP4": (partial(experts.experts, spread=experts.RAW), EXPERTS_HARMLESS, {}),
    "joint experts": (partial(experts.experts, experts.JOINT), JOINT_HARMLESS, {}),
    "joint experts, FP8": (
        partial(experts.experts, experts.JOINT, "fp8"), FP8_JOINT_HARMLESS, {},
    ),
    "joint experts, raw FP4": (
        partial(experts.experts, experts.JOINT, spread=experts.RAW), JOINT_HARMLESS, {},
    ),
    "joint experts, tall tiles": (
        partial(experts.experts, experts.TALL), TALL_HARMLESS, {},
    ),
    "joint experts, codes of h": (
        partial(experts.experts, experts.CODED), TALL_HARMLESS, {},
    ),
    "router": (experts.router, ROUTER_HARMLESS, {}),
    "router, Blackwell": (partial(experts.router, "sm_100a"), ROUTER_HARMLESS, {}),
    "router, many tokens": (experts.router_of_many, ROUTER_MANY_HARMLESS, {}),
    "router, many tokens, Blackwell": (
        partial(experts.router_of_many, "sm_100a"), ROUTER_MANY_HARMLESS, {},
    ),
    "plain linear, resident": (partial(linears.plain, 11, 0), PLAIN_RESIDENT_HARMLESS, {}),
    "plain linear, wide": (
        partial(linears.plain, 150, -1), weights(2), {},
    ),
    "best rows, resident": (
        partial(linears.argmax, 11, 0), {**PLAIN_RESIDENT_HARMLESS, **BEST_ROWS_HARMLESS}, {},
    ),
    "best rows, wide": (
        partial(linears.argmax, 150, -1, 4),
        {
            **weights(2),
            **BEST_ROWS_HARMLESS,
            ("atom.global", "__init__", "cluster"): (
                1,
                "a maximum: tiles of other rows of a token are the same cluster's here; resident "
                "ones are not, and it is noticed",
            ),
        },
        {},
    ),
    "grouped linear, resident": (partial(linears.grouped, 11, 0), {**weights(4), **QUEUE}, {}),
    "grouped linear, streamed": (partial(linears.grouped, 21, 1), GROUPED_STREAMED_HARMLESS, {}),
    "grouped linear, wide": (
        partial(linears.grouped, 67, -1), {**weights(2), **fences(2)}, {},
    ),
    "rotated linear, streamed": (partial(linears.rotated, 19, 1), {**weights(2), **filling(1)}, {}),
    # Of both kinds of weights.
    "merged linear, resident": (
        partial(linears.merged, 19, 0), {**weights(8), **QUEUE, **filling(2)}, {},
    ),
    "merged linear, wide": (
        partial(linears.merged, 150, -1), {**weights(4), **fences(2)}, {},
    ),
    "seam, Hopper": (partial(subjects.seam, "sm_90a"), SEAM_HARMLESS, SEAM_UNREACHED),
    "seam, Blackwell": (partial(subjects.seam, "sm_100a"), SEAM_HARMLESS, SEAM_UNREACHED),
    "compressor, Hopper": (partial(subjects.compressor, "sm_90a"), {}, {}),
    "compressor, Blackwell": (partial(subjects.compressor, "sm_100a"), {}, {}),
    "rows of latents, Hopper": (partial(subjects.latents, "sm_90a"), {}, {}),
    "rows of latents, Blackwell": (partial(subjects.latents, "sm_100a"), {}, {}),
    "quantisers of keys and values": (subjects.codes, {}, {}),
    "quantisers of keys and values, FP4": (partial(subjects.codes, "sm_100a"), {}, {}),
    "indices of a step": (partial(subjects.indices, "sm_90a"), {}, {}),
    "indices of a step, Blackwell": (partial(subjects.indices, "sm_100a"), {}, {}),
    "sampler, Hopper": (partial(subjects.sampler, "sm_90a", False), SAMPLER_HARMLESS, {}),
    "sampler, Blackwell": (partial(subjects.sampler, "sm_100a", False), SAMPLER_HARMLESS, {}),
    "sampler, cuts": (partial(subjects.sampler, "sm_90a", True), SAMPLER_CUTS_HARMLESS, {}),
    "sampler, cuts, Blackwell": (
        partial(subjects.sampler, "sm_100a", True), SAMPLER_CUTS_HARMLESS, {},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    make, harmless, unreached = KERNELS[name]
    compiled, runs = make()
    check_weaker(compiled, runs("eager"), harmless, unreached)


@pytest.mark.slow
def test_joint_products_hand_h_over_to_all_ctas() -> None:
    """In the schedule in which CTAs share the tiles out: else one takes nearly all of them."""
    compiled, runs = experts.experts(experts.JOINT)
    changes = [
        change
        for change in weakenings_of(compiled.artifacts.PTX)
        if change.place[1] in ("_publish_h", "_wait_for_h")
    ]
    assert len(changes) == 4, changes  # release and acquire: semantics and scope
    check(compiled, runs("lazy")[:1], changes, {}, {})


# ---- kernels without qualifiers ------------------------------------------------------------------
def insert(arch: str) -> Any:
    from dsv4.kernels.rows.kv_insert import build

    return build(kv_insert.Case(1).config, compiler_options(arch))


def norm(arch: str) -> Any:
    from dsv4.kernels.rows.rms_norm_fp8 import build

    return build(rms_norm_fp8.Case(1, 512).config, compiler_options(arch))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("build", [insert, norm])
def test_kernels_of_rows_have_no_qualifier_to_weaken(build, arch: str) -> None:
    """Their warps share nothing but what barriers of the CTA hand over."""
    assert weakenings_of(build(arch).artifacts.PTX) == []
