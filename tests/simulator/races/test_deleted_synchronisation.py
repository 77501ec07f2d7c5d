"""Deleting any one synchronisation instruction of a kernel is noticed: linears with code of their
own, the compressor, norms and rows of latents, indices, experts, the router of many tokens,
quantisers, what turns rows, the sampler, the seam of hyper-connections.

The bodies of FP8 weights are those of `fp8_linear`, whose deletions have a test of their own.
"""

from __future__ import annotations

from functools import partial

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import experts, linears, subjects
from tests.simulator.helpers.changes import Listed, check_deleted
from tests.simulator.races.test_fp8_linear_mutations import (
    CLUSTER,
    FENCE,
    FILLED,
    FIRST,
    LAUNCH,
    NO_ACTIVATIONS,
    PRODUCTS,
    QUEUES,
    RESIDENT,
    STREAMED,
    UNDER_WAY,
    WIDE,
)
from tests.simulator.races.test_router_mutations import LAST

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")


def releasing(kernel: Listed, releases: int) -> Listed:
    """A kernel's list, with so many releases of stages."""
    return {**kernel, ("bar.warp", "arrive_warp"): (releases, PRODUCTS)}


GROUPED_WIDE = {
    **WIDE,
    ("bar.sync", "run"): (1, CLUSTER),
    # Behind each of two slices.
    FENCE: (2, UNDER_WAY),
}
PLAIN_WIDE = {
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "load"): (1, FIRST),
    # In the loop of each of two slices, and behind it.
    ("bar.warp", "release_to"): (4, PRODUCTS),
    ("bar.sync", "run"): (1, CLUSTER),
}
# Weights in bf16, beside which activations pass through the ring.
PLAIN_RESIDENT = releasing({place: RESIDENT[place] for place in RESIDENT if place != FILLED}, 2)
# Of both kinds of weights.
MERGED_RESIDENT = {
    FILLED: (2, QUEUES),
    ("griddepcontrol.launch_dependents", "run"): (2, LAUNCH),
    ("griddepcontrol.wait", "compute"): (2, FIRST),
    ("griddepcontrol.wait", "load"): (2, NO_ACTIVATIONS),
    ("bar.warp", "arrive_warp"): (4, PRODUCTS),
}
MERGED_WIDE = {
    **GROUPED_WIDE,
    **PLAIN_WIDE,
    ("griddepcontrol.launch_dependents", "run"): (2, LAUNCH),
    ("bar.sync", "run"): (2, CLUSTER),
}
BEST_ROWS = {
    ("griddepcontrol.wait", "finish"): (1, "of CTAs without a tile: here all have some"),
    ("bar.sync", "sync_consumers"): (
        3,
        "behind zeros, and behind a tile's maxima: the ring goes round before a warp reads them, "
        "and its releases tell the consumers of each other; two in a row at the end",
    ),
}
COMPRESSOR = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "run"): (1, FIRST),
}
LATENT_ROWS = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    # Of each task.
    ("griddepcontrol.wait", "run"): (4, FIRST),
}
NORM = INSERT = COMPRESSOR
INDICES = RELAYOUT = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
}
QUANTIZE_KV = {
    # Of its three launches.
    ("griddepcontrol.launch_dependents", "kernel"): (3, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
    ("bar.sync", "reduce"): (1, "behind the last sums of a tile: nothing is written there again"),
}
SAMPLER = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
}
SAMPLER_CUTS = {
    **SAMPLER,
    ("bar.sync", "mass"): (
        2,
        "before the sums of warps, of the row and of a draw: barriers of draws lie between two",
    ),
    ("atom.shared", "__init__"): (4, "work, not order: counts whose loss moves no draw here"),
}

ROUTER_MANY = {
    FENCE: (4, UNDER_WAY),
    # Of the gate, the selection and the sort.
    ("griddepcontrol.launch_dependents", "kernel"): (3, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
    ("bar.sync", "kernel"): (1, CLUSTER),
    ("bar.warp", "kernel"): (
        1,
        "behind the reads of a token's ids: those of the next one are written behind the sync that "
        "its scores need",
    ),
    ("bar.warp", "count_pairs"): (1, "of the last batch: the CTA's barrier follows"),
    ("bar.warp", "next_place"): (1, LAST),
}
ZEROS_FENCED = (
    "the proxy fence behind the zeros, of the lane that initialises too, lies before the same "
    "barrier of the CTA"
)
EXPECTED_LATE = (
    "bytes may arrive before they are expected: the phase does not end without the arrival that "
    "expects them, and every lane has waited for the stage by itself"
)
# Of the three launches of products; the first two read no h.
EXPERTS = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, f"of the sum: {LAUNCH}"),
    ("griddepcontrol.launch_dependents", "take_role"): (3, LAUNCH),
    ("griddepcontrol.wait", "load"): (3, "reads weights and lists, which no launch here writes"),
    ("griddepcontrol.wait", "compute"): (
        3,
        "reads lists, and what the activation warps bring; its outputs the launch before does "
        "not touch",
    ),
    ("griddepcontrol.wait", "fill"): (2, "reads x and lists, which no launch here writes"),
    ("fence.mbarrier_init", "initialise"): (3, ZEROS_FENCED),
    ("fence.proxy", "clear"): (
        3,
        "zeros: the CTA's barrier tells every warp of them, and the fence behind a stage's codes, "
        "before the stage is handed over, is for all that its warp knows of",
    ),
    # Routed and shared experts, in each launch's loops.
    ("bar.warp", "load_stage"): (6, EXPECTED_LATE),
}
EXPERTS_UNREACHED = {
    ("cp.async", "copy_vector"): (5, "of the copies' unrolled loop: a tile has fewer vectors here"),
}
# Gate and up of the shared expert, then both products of the others.
BOARD = (
    "tiles of gate and up have one stage here: the board, of two tiles, lets the load warp run no "
    "further ahead than the ring's three stages"
)
FIRST_TILE = "of the first tile: the board is empty"
ZEROS = "zeros: the CTA's barrier tells every warp of them, and consumers fence before products"
JOINT = {
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.launch_dependents", "take_role"): (1, LAUNCH),
    ("griddepcontrol.wait", "load"): (2, "reads weights and lists, which no launch here writes"),
    ("griddepcontrol.wait", "compute"): (
        2,
        "reads lists, and what the activation warps bring; its outputs the launch before does "
        "not touch",
    ),
    ("griddepcontrol.wait", "fill"): (
        2,
        "of the first launch: reads x and lists; of the second: the load warp has waited for the "
        "launch before, whose h this reads, before it shows a tile on the board",
    ),
    ("fence.mbarrier_init", "initialise"): (1, ZEROS_FENCED),
    ("fence.mbarrier_init", "kernel"): (1, ZEROS_FENCED),
    ("fence.proxy", "clear"): (2, ZEROS),
    ("bar.warp", "load_stage"): (5, EXPECTED_LATE),
    ("bar.warp", "arrive_warp"): (
        2,
        "of a tile on the board, first and further ones: the lane that writes it arrives",
    ),
    ("mbarrier.try_wait", "_show"): (1, FIRST_TILE),
    ("mbarrier.try_wait", "load_tile"): (1, BOARD),
    ("mbarrier.try_wait", "_copy"): (1, BOARD),
}
# Tall tiles of gate and up have two stages of a ring of five, which the load warp goes round.
TALL = {
    place: reason
    for place, reason in JOINT.items()
    if place not in (("mbarrier.try_wait", "load_tile"), ("mbarrier.try_wait", "_copy"))
}
# Also of what rounds the shared expert's h.
CODED = {
    **TALL,
    ("griddepcontrol.launch_dependents", "kernel"): (3, LAUNCH),
}
# As it does in FP8.
READ_EARLIER = (
    "behind consumers' reads of a tile on the board, first and further ones: before the load warp "
    "shows another one in its place, it has waited for a stage that they released after the read"
)
FP8_JOINT = {
    **TALL,
    ("bar.warp", "arrive_warp"): (
        4,
        f"two as in FP4; and two {READ_EARLIER}",
    ),
}


def copies_unreached(copies: int) -> Listed:
    return {("cp.async", "copy_vector"): (copies, EXPERTS_UNREACHED["cp.async", "copy_vector"][1])}


JOINT_UNREACHED = copies_unreached(3)
SEAM = {
    # Of clusters, of both launches of parts and of the joint one.
    ("griddepcontrol.launch_dependents", "begin"): (2, LAUNCH),
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "begin"): (2, FIRST),
    ("griddepcontrol.wait", "kernel"): (1, f"of clusters: {FIRST}"),
    ("bar.sync", "kernel"): (1, f"behind the mbarriers' fence: {CLUSTER}"),
    ("bar.warp", "mix"): (
        3,
        "at the end of a pass, for each number of tokens: the arrival behind comb of the next pass "
        "orders lanes, too, where there is a sublayer before",
    ),
    ("red.relaxed", "kernel"): (
        1,
        "work, not order: CTAs that do not see the others begin leave their tokens to the last one",
    ),
}
SEAM_UNREACHED = {
    ("red.relaxed", "meet"): (1, "no CTA leaves its tokens here"),
    ("bar.sync", "run"): (2, "behind comb of a second chunk of tiles, of more tokens"),
}

# Subject, and what is not missed: by instruction and the kernel's function, how many of them, and
# why.
KERNELS = {
    "experts": (experts.experts, EXPERTS),
    "experts, FP8": (partial(experts.experts, dtype="fp8"), EXPERTS),
    "experts, raw FP4": (partial(experts.experts, spread=experts.RAW), EXPERTS),
    "joint experts": (partial(experts.experts, experts.JOINT), JOINT),
    "joint experts, FP8": (partial(experts.experts, experts.JOINT, "fp8"), FP8_JOINT),
    "joint experts, raw FP4": (
        partial(experts.experts, experts.JOINT, spread=experts.RAW),
        JOINT,
    ),
    "joint experts, tall tiles": (partial(experts.experts, experts.TALL), TALL),
    "joint experts, codes of h": (partial(experts.experts, experts.CODED), CODED),
    "router, many tokens": (experts.router_of_many, ROUTER_MANY),
    "router, many tokens, Blackwell": (partial(experts.router_of_many, "sm_100a"), ROUTER_MANY),
    # A slice's blocks but the last, and the last one.
    "plain linear, resident": (partial(linears.plain, 11, 0), PLAIN_RESIDENT),
    "plain linear, wide": (partial(linears.plain, 150, -1), PLAIN_WIDE),
    "best rows, resident": (
        partial(linears.argmax, 11, 0),
        {**PLAIN_RESIDENT, **BEST_ROWS},
    ),
    "best rows, wide": (partial(linears.argmax, 150, -1, 4), {**PLAIN_WIDE, **BEST_ROWS}),
    "grouped linear, resident": (partial(linears.grouped, 11, 0), RESIDENT),
    "grouped linear, streamed": (partial(linears.grouped, 21, 1), STREAMED),
    "grouped linear, wide": (partial(linears.grouped, 67, -1), GROUPED_WIDE),
    "merged linear, resident": (partial(linears.merged, 19, 0), MERGED_RESIDENT),
    "merged linear, wide": (partial(linears.merged, 150, -1), MERGED_WIDE),
    "rotated linear, streamed": (partial(linears.rotated, 19, 1), releasing(STREAMED, 4)),
    "compressor, Hopper": (partial(subjects.compressor, "sm_90a"), COMPRESSOR),
    "compressor, Blackwell": (partial(subjects.compressor, "sm_100a"), COMPRESSOR),
    "rows of latents, Hopper": (partial(subjects.latents, "sm_90a"), LATENT_ROWS),
    "rows of latents, Blackwell": (partial(subjects.latents, "sm_100a"), LATENT_ROWS),
    "norms of rows, a warp each": (partial(subjects.norm, "sm_90a", 512), NORM),
    "norms of rows, a CTA each": (partial(subjects.norm, "sm_90a", 4096), NORM),
    "norms of rows, a warp each, Blackwell": (partial(subjects.norm, "sm_100a", 512), NORM),
    "norms of rows, a CTA each, Blackwell": (partial(subjects.norm, "sm_100a", 4096), NORM),
    "latents in pages, Hopper": (partial(subjects.insert, "sm_90a"), INSERT),
    "latents in pages, Blackwell": (partial(subjects.insert, "sm_100a"), INSERT),
    "rows turned, Hopper": (partial(subjects.relayout, "sm_90a"), RELAYOUT),
    "rows turned, Blackwell": (partial(subjects.relayout, "sm_100a"), RELAYOUT),
    "indices of a step": (partial(subjects.indices, "sm_90a"), INDICES),
    "indices of a step, Blackwell": (partial(subjects.indices, "sm_100a"), INDICES),
    "quantisers of keys and values": (subjects.codes, QUANTIZE_KV),
    "quantisers of keys and values, FP4": (partial(subjects.codes, "sm_100a"), QUANTIZE_KV),
    "sampler, Hopper": (partial(subjects.sampler, "sm_90a", False), SAMPLER),
    "sampler, Blackwell": (partial(subjects.sampler, "sm_100a", False), SAMPLER),
    "sampler, cuts": (partial(subjects.sampler, "sm_90a", True), SAMPLER_CUTS),
    "sampler, cuts, Blackwell": (partial(subjects.sampler, "sm_100a", True), SAMPLER_CUTS),
    "seam, Hopper": (partial(subjects.seam, "sm_90a"), SEAM),
    "seam, Blackwell": (partial(subjects.seam, "sm_100a"), SEAM),
}

UNREACHED = {
    "experts": EXPERTS_UNREACHED,
    "experts, FP8": copies_unreached(3),
    "experts, raw FP4": EXPERTS_UNREACHED,
    "joint experts": JOINT_UNREACHED,
    "joint experts, FP8": JOINT_UNREACHED,
    "joint experts, raw FP4": JOINT_UNREACHED,
    "joint experts, tall tiles": copies_unreached(3),
    "joint experts, codes of h": copies_unreached(2),
    "seam, Hopper": SEAM_UNREACHED,
    "seam, Blackwell": SEAM_UNREACHED,
}
assert UNREACHED.keys() <= KERNELS.keys(), UNREACHED.keys() - KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    make, redundant = KERNELS[name]
    compiled, runs = make()
    runs = [run for s in SCHEDULES[:2] for run in runs(s)]
    check_deleted(compiled, runs, redundant, UNREACHED.get(name))
