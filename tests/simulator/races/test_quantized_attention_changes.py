"""Deleting any one synchronisation instruction of quantised attention, or weakening any one of its
qualifiers by a step, is noticed: up to 128 channels, and 256, causal, and with 64 not causal;
scales of rows, of heads, of blocks and of pairs of warps; sums of all tiles in one accumulator, and
of halves of a tile in fp16; fp16 values and a mask on Hopper; scales of rows, 128 channels, a mask,
and FP4 with the means of queries on Blackwell."""

from __future__ import annotations

from functools import partial

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers import subjects
from tests.simulator.helpers.changes import check_deleted, check_weaker
from tests.simulator.races.test_fp8_linear_mutations import EXPECTS, FIRST, LAUNCH, PRODUCTS

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

FREE = "the first one: nothing was in their place"
LAST_TURN = "the last turn, which is taken so that its barrier is left as it was: nothing follows"
UNSEEN = (
    "tiles of which a warpgroup sees nothing are released unread; they are fewer than the ring's"
)
ALL_READ = (
    "before queries are coded: the last weighted values, a product of all four warps behind all "
    "products with the queries before, were waited for"
)
LAST_VALUES = (
    "values of a work tile's last tiles: before their places are filled again here, keys or "
    "queries are loaded, whose places the same warps have released since"
)
LOADS = {
    ("mbarrier.arrive", "_load_keys", "relaxed"): (1, EXPECTS),
    ("mbarrier.arrive", "_load_queries", "relaxed"): (2, EXPECTS),
    ("mbarrier.arrive", "_load_values", "relaxed"): (1, EXPECTS),
}
HOPPER = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (2, FIRST),
    ("mbarrier.try_wait", "_load_queries"): (1, FREE),
    ("mbarrier.try_wait", "_pass_keys"): (2, UNSEEN),
    ("bar.warp", "arrive_warp"): (8, f"{PRODUCTS}; two: {UNSEEN}"),
    ("bar.sync", "take"): (1, LAST_TURN),
    ("bar.sync", "sync"): (1, ALL_READ),
}
HOPPER_WEAKER = {
    **LOADS,
    ("mbarrier.try_wait", "_load_queries", "relaxed"): (1, FREE),
    ("mbarrier.try_wait", "_pass_keys", "relaxed"): (2, UNSEEN),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (
        4,
        f"two: {UNSEEN}; two: {LAST_VALUES}",
    ),
}
# Fp16 values have the very table of FP8 ones. With scales of rows the softmax has the turns, and
# reads scales of keys before it releases these.
THREE_WAITS = (
    "values: a step waits for those of its tile twice, around its weights, for a branch, and the "
    "next step once more, but for the first step's: one of them is enough"
)
HOPPER_ROWS = {
    **HOPPER,
    ("mbarrier.try_wait", "_step"): (4, THREE_WAITS),
    ("bar.warp", "arrive_warp"): (5, f"values (3): {PRODUCTS}; two: {UNSEEN}"),
}
HOPPER_ROWS_WEAKER = {**HOPPER_WEAKER, ("mbarrier.try_wait", "_step", "relaxed"): (4, THREE_WAITS)}
# Of no tile that a diagonal cuts weights come in blocks, with the turns.
TWO_WAITS = (
    "values: a step waits for those of its tile twice, for branches around its weights, and what "
    "follows a work tile's last step once more: one of them is enough"
)
HOPPER_PLAIN = {
    **HOPPER,
    ("mbarrier.try_wait", "_weigh_in_blocks"): (4, TWO_WAITS),
    ("mbarrier.try_wait", "_pass_seen"): (1, TWO_WAITS),
}
HOPPER_PLAIN_WEAKER = {
    **HOPPER_WEAKER,
    ("mbarrier.try_wait", "_weigh_in_blocks", "relaxed"): (4, TWO_WAITS),
    ("mbarrier.try_wait", "_pass_seen", "relaxed"): (1, TWO_WAITS),
}
# The softmax has the turns, too; scales of keys are no part of the ring.
HOPPER_BLOCKS = {**HOPPER, ("mbarrier.try_wait", "_step"): (4, THREE_WAITS)}
# Behind the launch that finds the largest queries.
HOPPER_HEADS = {
    **HOPPER_BLOCKS,
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (
        3,
        f"of the first launch: {FIRST}; of the load warp: it reads nothing of that launch; of the "
        "others: queries, which they wait for first, are loaded behind the load warp's wait",
    ),
}
# Sums of all tiles in one accumulator, which the next product takes as it is.
LAST_STEPS = f"what waits for values in the loop of a work tile's last tiles; {LAST_VALUES}"
HOPPER_SUMMED = {
    **HOPPER_BLOCKS,
    ("wgmma.commit_group", "_issue_values"): (1, LAST_STEPS),
    ("wgmma.wait_group", "_step"): (1, LAST_STEPS),
}
# Two warpgroups; a ring of keys so short that a wait for unread ones is missed.
UNSEEN_VALUES = f"values: {UNSEEN}"
HOPPER_WIDEST = {**HOPPER, ("mbarrier.try_wait", "_pass_keys"): (1, UNSEEN_VALUES)}
HOPPER_WIDEST_WEAKER = {
    **HOPPER_WEAKER,
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (3, f"two: {UNSEEN}; one: {LAST_VALUES}"),
}
# All tiles but a work tile's first one pass the loop of masked ones; behind the launch that lists
# tiles, whose lists the load warp reads first.
LISTS = {
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (
        2,
        f"of the first launch: {FIRST}; of the consumers: queries, which they wait for first, are "
        "loaded behind the load warp's wait",
    ),
}
HOPPER_MASKED = {
    **HOPPER,
    **LISTS,
    ("mbarrier.try_wait", "_step"): (2, THREE_WAITS),
    ("bar.warp", "arrive_warp"): (6, f"{PRODUCTS}; two: {UNSEEN}"),
}
HOPPER_MASKED_WEAKER = {
    **HOPPER_WEAKER,
    ("mbarrier.try_wait", "_step", "relaxed"): (2, THREE_WAITS),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (3, f"two: {UNSEEN}; one: {LAST_VALUES}"),
}
CODED = (
    "the first scores of a work tile: its queries' codes were waited for, which each warp hands "
    "over when it has read the scores before"
)
AT_THE_END = "so that no commit outlives the CTA: that of the sums, of the same products, does not"
WITH_SCORES = "scales of keys: the scores were waited for, whose product waited for both"
ARRIVALS = (
    "codes of queries: the lanes met when they released the rows, and have only fenced since; "
    "scores: what was read of them is there for the whole warp, its loads end together"
)
# Scales of tiles' keys are no part of the ring.
MASKED = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (3, FIRST),
    ("mbarrier.try_wait", "_load_queries"): (1, FREE),
    # Of each warpgroup.
    ("mbarrier.try_wait", "_score"): (3, f"{CODED} (2); {AT_THE_END}"),
    ("tcgen05.fence::after_thread_sync", "_score"): (2, CODED),
    ("bar.warp", "arrive_warp"): (2, ARRIVALS),
    ("bar.sync", "take"): (1, LAST_TURN),
}
MASKED_WEAKER = {
    **LOADS,
    ("mbarrier.try_wait", "_load_queries", "relaxed"): (1, FREE),
    ("mbarrier.try_wait", "_score", "relaxed"): (3, f"{CODED} (2); {AT_THE_END}"),
}
SPEED_ALONE = (
    "a turn: it is for speed alone, and the arrivals of these launches make up pairs without "
    f"it; {LAST_TURN}"
)
HOPPER_WIDEST_HALVES = {
    **HOPPER_WIDEST,
    ("bar.sync", "take"): (2, SPEED_ALONE),
    ("wgmma.fence", "__init__"): (
        3,
        "values of the second half of the channels: since the fence before those of the first one, "
        "nothing has written registers of their product",
    ),
}
HOPPER_WIDEST_HALVES_WEAKER = {
    **HOPPER_WEAKER,
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (2, UNSEEN),
}
LISTED = {
    **MASKED,
    ("griddepcontrol.launch_dependents", "kernel"): (2, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (
        2,
        f"of the first launch: {FIRST}; of the softmax: queries, which it waits for first, are "
        "loaded behind the load warp's wait",
    ),
    # Both warpgroups pass the tiles of one list.
    ("bar.sync", "take"): (2, SPEED_ALONE),
}
WIDE = {
    **MASKED,
    ("tcgen05.fence::after_thread_sync", "_weigh"): (
        1,
        "the second warpgroup's tiles but the last: it sees two at most in these launches, and the "
        "first one's values replace sums that nobody has scaled; a third tile would need it",
    ),
    ("bar.sync", "take"): (2, SPEED_ALONE),
}
BLACKWELL = {
    **MASKED,
    ("mbarrier.try_wait", "_load_products"): (1, WITH_SCORES),
    ("mbarrier.try_wait", "compute"): (1, UNSEEN),
    ("bar.warp", "arrive_warp"): (3, f"{ARRIVALS}; {UNSEEN}"),
}
BLACKWELL_WEAKER = {
    **MASKED_WEAKER,
    ("mbarrier.try_wait", "_load_products", "relaxed"): (1, WITH_SCORES),
    ("mbarrier.try_wait", "compute", "relaxed"): (1, UNSEEN),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, UNSEEN),
}
SCORES_READ = (
    "the first scores of a work tile: the weights of all tiles before were waited for, which warps "
    "write when they have read the scores, of both warpgroups"
)
SAME_VALUES = (
    "scales of a tile of values that is not the last: the first warpgroup's product with it came "
    "before and copied them, since it sees all tiles but the last that the second one sees"
)
TURN = (
    "a turn: it is for speed alone, and in FP4 warpgroups alternate at the one place of scores, "
    "too; the arrivals of these launches make up pairs without it"
)
FP4 = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (3, FIRST),
    ("mbarrier.try_wait", "_load_queries"): (1, FREE),
    # Of both warpgroups' scores before those of the first one; of its own before the second one's.
    ("mbarrier.try_wait", "_score"): (4, f"{SCORES_READ} (3); {AT_THE_END}"),
    ("tcgen05.fence::after_thread_sync", "_score"): (1, SCORES_READ),
    ("tcgen05.cp", "copy_scales"): (1, SAME_VALUES),
    ("bar.warp", "arrive_warp"): (2, ARRIVALS),
    ("bar.sync", "take"): (2, f"{TURN}; {LAST_TURN}"),
}
FP4_WEAKER = {
    **LOADS,
    ("mbarrier.try_wait", "_load_queries", "relaxed"): (1, FREE),
    ("mbarrier.try_wait", "_score", "relaxed"): (4, f"{SCORES_READ} (3); {AT_THE_END}"),
}

# Subject, what is not missed and what may be weaker: by instruction, the kernel's function and the
# new qualifier, how many of them, and why.
KERNELS = {
    "Hopper": (partial(subjects.quantized, "wide"), HOPPER, HOPPER_WEAKER),
    "Hopper, not causal": (partial(subjects.quantized, "plain"), HOPPER_PLAIN, HOPPER_PLAIN_WEAKER),
    "Hopper, rows": (partial(subjects.quantized, "rows"), HOPPER_ROWS, HOPPER_ROWS_WEAKER),
    "Hopper, heads": (partial(subjects.quantized, "heads"), HOPPER_HEADS, HOPPER_ROWS_WEAKER),
    "Hopper, blocks": (partial(subjects.quantized, "blocks"), HOPPER_BLOCKS, HOPPER_ROWS_WEAKER),
    "Hopper, pairs": (partial(subjects.quantized, "pairs"), HOPPER_BLOCKS, HOPPER_ROWS_WEAKER),
    "Hopper, 256 channels": (
        partial(subjects.quantized, "widest"), HOPPER_WIDEST, HOPPER_WIDEST_WEAKER,
    ),
    "Hopper, 256 channels, fp16": (
        partial(subjects.quantized, "widest halves"),
        HOPPER_WIDEST_HALVES,
        HOPPER_WIDEST_HALVES_WEAKER,
    ),
    "Hopper, one accumulator": (
        partial(subjects.quantized, "summed"), HOPPER_SUMMED, HOPPER_ROWS_WEAKER,
    ),
    "Hopper, fp16 sums": (
        partial(subjects.quantized, "flushed"), HOPPER_BLOCKS, HOPPER_ROWS_WEAKER,
    ),
    "Hopper, masked": (partial(subjects.quantized, "masked"), HOPPER_MASKED, HOPPER_MASKED_WEAKER),
    "Hopper, fp16": (partial(subjects.quantized, "halves"), HOPPER, HOPPER_WEAKER),
    "Blackwell": (partial(subjects.blackwell_quantized, "rows"), BLACKWELL, BLACKWELL_WEAKER),
    "Blackwell, wide": (partial(subjects.blackwell_quantized, "wide"), WIDE, MASKED_WEAKER),
    "Blackwell, masked": (partial(subjects.blackwell_quantized, "masked"), LISTED, MASKED_WEAKER),
    "Blackwell, FP4": (partial(subjects.blackwell_quantized, "fp4"), FP4, FP4_WEAKER),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name: str) -> None:
    make, redundant, _ = KERNELS[name]
    compiled, runs = make()
    check_deleted(compiled, [run for s in SCHEDULES[:2] for run in runs(s)], redundant)


@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    make, _, harmless = KERNELS[name]
    compiled, runs = make()
    check_weaker(compiled, runs("eager"), harmless)
