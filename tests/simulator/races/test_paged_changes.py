"""Deleting any one synchronisation instruction of an attention kernel over pages, or weakening any
one of its qualifiers by a step, is noticed.

What a kernel has in common with that of gathered keys goes unnoticed for the reasons given there.
"""

from __future__ import annotations

import pytest

from dsv4.testing.harness import SCHEDULES
from tests.simulator.helpers.changes import Listed, check_deleted, check_weaker
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import paged, paged_codes
from tests.simulator.races.test_attention_mutations import (
    EARLY_START,
    EXPECTS,
    HARMLESS,
    LAUNCH,
    LAUNCHES_IN_ORDER,
    REDUNDANT,
    UNSHARED,
)

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

WITH_S = (
    "words about a tile: they are written before its keys are handed over, and the softmax has "
    "waited for the product with these"
)
BEHIND_KEYS = (
    "words about a tile: stages of keys were waited for before, which are free when the products "
    "that came behind the reading of older words are over"
)
ONE_LANE = "the lane that arrives has stored the words"
SPAN = "the span's place is free: each warp releases it before Q, whose release was waited for"


def gathered(listed: Listed, *left_out: str) -> Listed:
    """What is listed for the kernel of gathered keys, without some of its functions."""
    return {place: found for place, found in listed.items() if place[1] not in left_out}


ONE_GROUP = "a tile's copies are one group, which is waited for before its first unit"
HINT = "a hint: the wait follows"
FENCED_TWICE = "the wait's own: one fence for all that is there follows"
V_WITH_P = "V: P of a key tile was made from its scores, whose warpgroup waited for the same rows"
COPY_WORD = "a sink: the kernel with splits reads it where there are none, as in no launch here"
TURNS = "turns of PV, which only keep it out of the way of other products"
ROWS_WITH_P = (
    "rows: places of P were waited for since, which the output warpgroups free behind their reads "
    "of older rows"
)

# By kernel, what is not missed, and what may be weaker: by instruction, the kernel's function and
# the new qualifier, how many of them, and why.
PAIR = REDUNDANT["pair"]
FIRST_S = (
    "S of a token's first tiles: weights of the last token's were waited for, which were made from "
    "what these stages held"
)
SWAP_AB_DELETED = {
    ("griddepcontrol.launch_dependents", "gather"): (1, LAUNCH),
    ("griddepcontrol.wait", "gather"): (1, LAUNCHES_IN_ORDER),
    ("mbarrier.try_wait", "compute"): (1, "the first one: " + LAUNCHES_IN_ORDER),
    ("mbarrier.try_wait", "_find_keys"): (1, SPAN),
    ("bar.warp", "arrive_warp"): (
        5,
        f"what is said of a tile: {ONE_LANE}; the span's release: Q's follows it; Q and V were "
        "read by products, which the whole warpgroup has waited for; Q of a token without keys "
        "is released unread",
    ),
    ("bar.sync", "sync"): (
        5,
        "behind the sinks: those of a softmax are read at the end, behind other barriers; "
        "before the sums (3): barriers of the semaphore, or of the largest scores, lie behind the "
        "reads of the work tile before, and in a cluster there is none; before the largest scores: "
        "those of the sums do",
    ),
}
# Heads in M of 512 columns, a sub-tile of them each in slices. Two kernels, as for "heads_m".
SLICES = "slices of columns: a CTA has one split, whose tiles have stages of their own here"
OTHER_HALF = "what another slice has of a stage (1): QK alone read it, and its P was waited for"
STAGED_Q = "Q's stage (4): TMA alone fills it"
Q_HALF = (
    "keys fill the other half of Q's stage first, whose release is behind the same reads; where Q "
    "comes next, as with splits, it is noticed"
)
P_OF_STAGE = (
    "P's place beside a work tile's second key tile: that one's stage is free behind the products "
    "with the P that is there, unless a token without keys, whose span is taken behind them, lies "
    "between; beside third ones it is noticed"
)
WIDE_DELETED = {
    **gathered(REDUNDANT["hopper"], "load", "schedule", "lockstep", "cluster_sync"),
    ("griddepcontrol.wait", "gather"): (2, LAUNCHES_IN_ORDER),
    ("cp.async", "copy_word"): (1, COPY_WORD),
    ("cp.async", "tma_prefetch"): (16, "a hint, which moves nothing but lines of L2"),
    ("cp.async", "_store_staged"): REDUNDANT["streaming"]["cp.async", "_store_staged"],
    ("mbarrier.arrive", "arrive_warp"): (2, SLICES),
    ("mbarrier.try_wait", "_multiply_tiles"): (8, f"{V_WITH_P} (3); {TURNS} (5)"),
    ("mbarrier.try_wait", "score"): (1, ROWS_WITH_P),
    ("wgmma.commit_group", "_multiply_values"): (
        9,
        REDUNDANT["hopper"]["wgmma.commit_group", "_multiply_values"][1],
    ),
    ("wgmma.wait_group", "_multiply_values"): (
        6,
        REDUNDANT["hopper"]["wgmma.wait_group", "_multiply_values"][1],
    ),
}
READ_BY_PRODUCTS = (
    "what was read of Q (2) and of V (3) was read by products, which the whole warpgroup has "
    "waited for; Q of a token without keys (2) is released unread"
)
DELETED = {
    "swap_ab": SWAP_AB_DELETED,
    "swap_ab_fp8": {
        **SWAP_AB_DELETED,
        ("cp.async", "gather_tiles"): (3, ONE_GROUP),
        ("bar.warp", "gather_tiles"): (3, ONE_GROUP),
        ("bar.warp", "arrive_warp"): (
            7,
            "the span's release: Q's follows it; Q and V (four slots a tile) were read by "
            "products, which the whole warpgroup has waited for; Q of a token without keys is "
            "released unread",
        ),
    },
    # Two kernels: without splits, and with splits or column slices.
    "heads_m": {
        **gathered(REDUNDANT["hopper"], "load", "schedule", "lockstep", "cluster_sync"),
        ("griddepcontrol.wait", "gather"): (2, LAUNCHES_IN_ORDER),
        ("cp.async", "copy_word"): (1, COPY_WORD),
        ("mbarrier.test_wait", "_issue_scores"): (2, HINT),
        ("fence.proxy", "_multiply_keys"): (2, FENCED_TWICE),
        ("fence.proxy", "_multiply_tiles"): (2, V_WITH_P),
        ("mbarrier.try_wait", "_multiply_tiles"): (6, f"{V_WITH_P}; {TURNS} (4)"),
        ("mbarrier.try_wait", "score"): (1, ROWS_WITH_P),
        ("bar.warp", "arrive_warp"): (
            21,
            f"what is said of a tile (4): {ONE_LANE}; PV's turns (9) hand nothing over; what was "
            "read of Q (2) and of V (2) was read by products, which the whole warpgroup has waited "
            f"for; Q of a token without keys (2) is released unread; {ROWS_WITH_P} (2)",
        ),
    },
    "heads_m_fp8": {
        **WIDE_DELETED,
        ("mbarrier.test_wait", "_issue_scores"): (1, P_OF_STAGE),
        ("bar.warp", "arrive_warp"): (
            16,
            f"PV's turns (7) hand nothing over; {READ_BY_PRODUCTS}; {ROWS_WITH_P} (1); "
            f"{OTHER_HALF}",
        ),
    },
    "heads_m_latents": {
        **WIDE_DELETED,
        ("fence.proxy", "_load_q_registers"): (
            4,
            "the wait's own: TMA brings Q, and its mbarrier is what ordinary loads wait for",
        ),
        ("fence.proxy", "_multiply_keys"): (2, FENCED_TWICE),
        ("fence.proxy", "_multiply_tiles"): (3, V_WITH_P),
        ("mbarrier.test_wait", "_issue_scores"): (3, f"{HINT} (2); {P_OF_STAGE} (1)"),
        ("mbarrier.try_wait", "_send_q"): (
            1,
            "the second half of Q's stage, with splits of two tiles at most: what it held was read "
            "before the span was free, or is the Q before, of which both halves were read before "
            "the first was released; of longer ones, as without splits, it is noticed",
        ),
        ("bar.warp", "arrive_warp"): (
            29,
            f"{STAGED_Q}; what is said of a tile (4): {ONE_LANE}; the second half of Q's stage "
            "(2): the sync for the first one follows the same reads; the first one without splits "
            f"(1): {Q_HALF}; PV's turns (9) hand nothing over; {READ_BY_PRODUCTS}; {ROWS_WITH_P} "
            f"(1); {OTHER_HALF}",
        ),
    },
    "codes": {
        ("fence.mbarrier_init", "kernel"): (
            1,
            "neither another CTA nor a copy of the async proxy arrives: the CTA's barrier orders",
        ),
        ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
        ("griddepcontrol.wait", "gather"): (1, LAUNCHES_IN_ORDER),
        ("bar.sync", "_sync"): (
            1,
            "the first one: a warp stores the rows of Q that its own products have read",
        ),
        ("mbarrier.test_wait", "_multiply_keys"): (1, HINT),
        ("wgmma.commit_group", "_multiply_keys"): (1, TURNS),
        ("wgmma.wait_group", "_multiply_keys"): (1, TURNS),
        ("wgmma.wait_group", "_multiply_tile"): (
            2,
            "the last sum but one: the compiler adds it behind the wait for the last one",
        ),
        ("bar.warp", "arrive_warp"): (
            2,
            "the release of P: products read it, which the whole warpgroup has waited for",
        ),
    },
    "codes_pair": {
        **{
            place: PAIR[place]
            for place in (
                ("fence.mbarrier_init", "run"),
                ("tcgen05.fence::after_thread_sync", "mma_warp"),
                ("mbarrier.try_wait", "_end_queries"),
                ("tcgen05.fence::before_thread_sync", "_end_queries"),
            )
        },
        ("griddepcontrol.launch_dependents", "_gather"): (1, LAUNCH),
        ("griddepcontrol.wait", "run"): (1, LAUNCHES_IN_ORDER),
        ("mbarrier.try_wait", "_qk"): (1, FIRST_S),
        ("tcgen05.fence::after_thread_sync", "_qk"): (1, FIRST_S),
        ("mbarrier.try_wait", "receive_keys"): (1, WITH_S),
        ("mbarrier.try_wait", "send_keys"): (1, BEHIND_KEYS),
        ("bar.warp", "arrive_warp"): (2, f"full: {WITH_S}; empty: {BEHIND_KEYS}"),
        ("cp.async", "_store_output"): (
            3,
            "all boxes but the last: its group, which is waited for, has the stores before it, too",
        ),
        ("bar.warp", "_wait_for_stores"): (
            1,
            "after the last token: nothing is written to these places any more",
        ),
    },
    "one_cta": {
        **gathered(REDUNDANT["single"], "load_warps"),
        ("griddepcontrol.launch_dependents", "_load_rows"): (1, LAUNCH),
        ("bar.warp", "arrive_warp"): (1, ONE_LANE),
        ("mbarrier.try_wait", "receive"): (1, WITH_S),
        ("bar.sync", "kernel"): (1, "the combine's: three splits are one group, it sums alone"),
    },
    "one_cta_fp8": {
        **gathered(REDUNDANT["single"], "load_warps"),
        ("griddepcontrol.launch_dependents", "_load_entries"): (1, LAUNCH),
        ("bar.warp", "arrive_warp"): (2, ONE_LANE),
        ("mbarrier.try_wait", "receive"): (1, WITH_S),
        ("mbarrier.try_wait", "send"): (1, BEHIND_KEYS),
        ("tcgen05.commit", "_pv"): (3, "the last tile's chunks (2) and P: nobody fills them again"),
        ("bar.sync", "kernel"): (1, "the combine's: three splits are one group, it sums alone"),
    },
    "two_ctas": {
        **gathered(REDUNDANT["pair"], "load_warps"),
        ("griddepcontrol.launch_dependents", "_load_rows"): (1, LAUNCH),
        ("bar.warp", "arrive_warp"): (2, ONE_LANE),
        ("mbarrier.try_wait", "receive"): (1, WITH_S),
        ("mbarrier.try_wait", "send"): (1, BEHIND_KEYS),
    },
    # The gather warps of the two CTAs, which convert other columns, have code of their own.
    "two_ctas_fp8": {
        **gathered(REDUNDANT["pair"], "load_warps"),
        ("griddepcontrol.launch_dependents", "_load_entries"): (2, LAUNCH),
        ("bar.warp", "arrive_warp"): (3, ONE_LANE),
        ("mbarrier.arrive", "arrive_warp"): (
            1,
            "the release of words about a tile: eight tiles, as many as there are places, so that "
            "nobody waits for one; with ten it is a deadlock",
        ),
        ("mbarrier.try_wait", "receive"): (1, WITH_S),
        ("mbarrier.try_wait", "send"): (2, BEHIND_KEYS),
    },
}
SWAP_AB_HARMLESS = {
    ("atom.global", "__init__", "acquire"): HARMLESS["few"]["atom.global", "", "acquire"],
    ("atom.global", "__init__", "cluster"): HARMLESS["few"]["atom.global", "", "cluster"],
    ("mbarrier.arrive", "gather", "relaxed"): (1, EXPECTS),
    ("mbarrier.try_wait", "_find_keys", "relaxed"): (1, SPAN),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, SPAN),
    ("mbarrier.try_wait", "compute", "relaxed"): (1, "the first one: " + LAUNCHES_IN_ORDER),
}
# Compare "heads_m": the counter's `or` at the scope of a cluster is noticed in these.
WIDE_HARMLESS = {
    ("atom.global", "__init__", "acquire"): HARMLESS["few"]["atom.global", "", "acquire"],
    ("atom.global", "__init__", "release"): (
        1,
        "the counter's `or`: splits that nobody waits for are of one CTA here",
    ),
    ("mbarrier.arrive", "_load_q_smem", "relaxed"): (2, EXPECTS),
    ("mbarrier.try_wait", "_multiply_tiles", "relaxed"): (8, f"{V_WITH_P} (3); {TURNS} (5)"),
    ("mbarrier.try_wait", "score", "relaxed"): (1, ROWS_WITH_P),
}
WEAKER = {
    "swap_ab": {
        **SWAP_AB_HARMLESS,
        ("barrier.cluster", "_leave", "relaxed"): (1, "of a warp that had nothing to read"),
    },
    "swap_ab_fp8": SWAP_AB_HARMLESS,
    "heads_m": {
        ("atom.global", "__init__", "acquire"): HARMLESS["few"]["atom.global", "", "acquire"],
        ("atom.global", "__init__", "cluster"): (
            2,
            "the counter's `and`: as in swap-AB; its `or`: splits that nobody waits for are of one "
            "CTA here, those of swap-AB are not, and it is noticed",
        ),
        ("fence.proxy", "_multiply_keys", "global"): (2, FENCED_TWICE),
        ("fence.proxy", "_multiply_tiles", "global"): (2, V_WITH_P),
        ("mbarrier.arrive", "_load_q_smem", "relaxed"): (2, EXPECTS),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            15,
            "what is said of a tile (4): the arrival of the other half's copies comes behind the "
            f"words; PV's turns (9) hand nothing over; {ROWS_WITH_P} (2)",
        ),
        ("mbarrier.test_wait", "_has_landed", "relaxed"): (3, HINT),
        ("mbarrier.test_wait", "_issue_scores", "relaxed"): (2, HINT),
        ("mbarrier.try_wait", "_multiply_tiles", "relaxed"): (6, f"{V_WITH_P}; {TURNS} (4)"),
        ("mbarrier.try_wait", "score", "relaxed"): (2, ROWS_WITH_P),
    },
    "heads_m_fp8": {
        **WIDE_HARMLESS,
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            10,
            f"PV's turns (7) hand nothing over; {ROWS_WITH_P} (1); {SLICES} (2)",
        ),
        ("mbarrier.test_wait", "_has_landed", "relaxed"): (2, HINT),
        ("mbarrier.test_wait", "_issue_scores", "relaxed"): (1, P_OF_STAGE),
    },
    "heads_m_latents": {
        **WIDE_HARMLESS,
        ("atom.global", "__init__", "cluster"): HARMLESS["few"]["atom.global", "", "cluster"],
        ("fence.proxy", "_load_q_registers", "global"): (4, "as without it"),
        ("fence.proxy", "_multiply_keys", "global"): (2, FENCED_TWICE),
        ("fence.proxy", "_multiply_tiles", "global"): (3, V_WITH_P),
        ("mbarrier.arrive", "_send_q", "relaxed"): (
            8,
            f"{EXPECTS} (4); threads arrive for copies of keys, of which Q's stage has none (4)",
        ),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            21,
            f"{STAGED_Q}; what is said of a tile (4): the arrival of the other half's copies comes "
            f"behind the words; the first half of Q without splits (1): {Q_HALF}; PV's turns (9) "
            f"hand nothing over; {ROWS_WITH_P} (1); {SLICES} (2)",
        ),
        ("mbarrier.test_wait", "_has_landed", "relaxed"): (
            3,
            f"{HINT} (2); without splits, the next tile's (1): its other half, whose copies are "
            "behind, is found to be there before its products",
        ),
        ("mbarrier.test_wait", "_issue_scores", "relaxed"): (
            4,
            f"{HINT} (2); with splits (1): {P_OF_STAGE}; without (1): the same, and where P's "
            "place is not free at the test, the wait that follows acquires",
        ),
        ("mbarrier.try_wait", "_send_q", "relaxed"): (1, "as without it"),
    },
    "codes": {("mbarrier.test_wait", "_multiply_keys", "relaxed"): (1, HINT)},
    "codes_pair": {
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (2, f"full: {WITH_S}; empty: {BEHIND_KEYS}"),
        ("mbarrier.try_wait", "receive_keys", "relaxed"): (1, WITH_S),
        ("mbarrier.try_wait", "send_keys", "relaxed"): (1, BEHIND_KEYS),
        ("mbarrier.try_wait", "_end_queries", "relaxed"): (
            1,
            "the last Q: the softmax warps, which free TMEM, have waited for every product",
        ),
        ("mbarrier.try_wait", "_qk", "relaxed"): (1, FIRST_S),
    },
    "one_cta": {
        **gathered(HARMLESS["single"], "_load_tiles"),
        ("mbarrier.arrive", "_load_rows", "relaxed"): (1, EXPECTS),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, WITH_S),
        ("mbarrier.try_wait", "receive", "relaxed"): (1, WITH_S),
    },
    "one_cta_fp8": {
        **gathered(HARMLESS["single"], "_load_tiles"),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (2, f"full: {WITH_S}; empty: {BEHIND_KEYS}"),
        ("mbarrier.try_wait", "receive", "relaxed"): (1, WITH_S),
        ("mbarrier.try_wait", "send", "relaxed"): (1, BEHIND_KEYS),
    },
    "two_ctas": {
        **gathered(HARMLESS["pair"], "_load_tiles"),
        ("mbarrier.arrive", "_load_rows", "relaxed"): (1, EXPECTS),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            2,
            f"full: {WITH_S}; empty: {BEHIND_KEYS}",
        ),
        ("mbarrier.try_wait", "receive", "relaxed"): (1, WITH_S),
        ("mbarrier.try_wait", "send", "relaxed"): (1, BEHIND_KEYS),
    },
    "two_ctas_fp8": {
        **gathered(HARMLESS["pair"], "_load_tiles"),
        ("mbarrier.arrive", "commit", "cta"): (
            1,
            "the leading CTA's: the warp that multiplies what it converts is its own; those of the "
            "other CTA may not",
        ),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            3,
            f"full (2): {WITH_S}; empty: {BEHIND_KEYS}",
        ),
        ("mbarrier.try_wait", "receive", "relaxed"): (1, WITH_S),
        ("mbarrier.try_wait", "send", "relaxed"): (2, BEHIND_KEYS),
    },
}

# What no launch here runs, likewise.
LATE_TWICE = "PV goes first where the rest of a tile is late: here it is there at the second look"
LATE = "PV goes first where the rest of a tile is late: here that of first ones alone is"
SHORT = "splits have two tiles at most here, and the second one is there in time"
P_IS_FREE = "P's place is free at the test"
MORE_SPLITS = (
    "of more splits (4), as of rows; of a warp that has nothing to read (1): all have here"
)
UNREACHED = {
    "swap_ab_fp8": {("barrier.cluster", "_leave"): (5, MORE_SPLITS)},
    "heads_m": {
        ("cp.async", "tma_prefetch"): (2, EARLY_START),
        ("bar.warp", "arrive_warp"): (2, f"{LATE_TWICE}; {UNSHARED}"),
        ("mbarrier.arrive", "arrive_warp"): (2, f"{LATE_TWICE}; {UNSHARED}"),
        ("mbarrier.try_wait", "output"): (1, UNSHARED),
    },
    "heads_m_fp8": {
        ("bar.warp", "arrive_warp"): (5, f"{LATE} (2); {SHORT} (2); {UNSHARED} (1)"),
        ("mbarrier.arrive", "arrive_warp"): (5, f"{LATE} (2); {SHORT} (2); {UNSHARED} (1)"),
        ("mbarrier.try_wait", "_issue_scores"): (3, f"{P_IS_FREE} (2); {SHORT} (1)"),
        ("mbarrier.try_wait", "_multiply_keys"): (1, SHORT),
        ("mbarrier.try_wait", "output"): (1, UNSHARED),
    },
    "heads_m_latents": {
        ("bar.warp", "arrive_warp"): (2, f"{LATE_TWICE}; {UNSHARED}"),
        ("mbarrier.arrive", "arrive_warp"): (2, f"{LATE_TWICE}; {UNSHARED}"),
        ("mbarrier.try_wait", "_issue_scores"): (1, f"with splits, {P_IS_FREE}"),
        ("mbarrier.try_wait", "output"): (1, UNSHARED),
    },
}
UNREACHED_WEAKER = {
    "swap_ab_fp8": {("barrier.cluster", "_leave", "relaxed"): (5, MORE_SPLITS)},
    "heads_m": {
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (2, f"{LATE_TWICE}; {UNSHARED}"),
        ("mbarrier.try_wait", "output", "relaxed"): (1, UNSHARED),
    },
    "heads_m_fp8": {
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            5,
            f"{LATE} (2); {SHORT} (2); {UNSHARED} (1)",
        ),
        ("mbarrier.try_wait", "_issue_scores", "relaxed"): (3, f"{P_IS_FREE} (2); {SHORT} (1)"),
        ("mbarrier.try_wait", "_multiply_keys", "relaxed"): (1, SHORT),
        ("mbarrier.try_wait", "output", "relaxed"): (1, UNSHARED),
    },
    "heads_m_latents": {
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (2, f"{LATE_TWICE}; {UNSHARED}"),
        ("mbarrier.try_wait", "_issue_scores", "relaxed"): (1, f"with splits, {P_IS_FREE}"),
        ("mbarrier.try_wait", "output", "relaxed"): (1, UNSHARED),
    },
}


CODES = {"codes": "sm_90a", "codes_pair": "sm_100a"}


def launches(name: str) -> tuple[object, list[Run]]:
    """A compiled kernel, and its launches in two schedules."""
    compiled, runs = paged_codes(CODES[name]) if name in CODES else paged(name)
    return compiled, [run for schedule in SCHEDULES[:2] for run in runs(schedule)]


@pytest.mark.parametrize("name", DELETED)
def test_all_deletions_are_noticed(name: str) -> None:
    check_deleted(*launches(name), DELETED[name], UNREACHED.get(name))


@pytest.mark.parametrize("name", WEAKER)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    check_weaker(*launches(name), WEAKER[name], UNREACHED_WEAKER.get(name))
