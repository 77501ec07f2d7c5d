"""Deleting any one synchronisation instruction of an attention kernel whose splits are pieces of
each token's keys, or weakening any one of its qualifiers by a step, is noticed.

What a kernel has in common with that of other splits goes unnoticed for the reasons given there.
"""

from __future__ import annotations

import pytest

from tests.simulator.helpers.changes import check_deleted, check_weaker
from tests.simulator.races.test_attention_mutations import (
    EXPECTS,
    HARMLESS,
    LAUNCH,
    LAUNCHES_IN_ORDER,
    REDUNDANT,
)
from tests.simulator.races.test_paged_changes import (
    FENCED_TWICE,
    HINT,
    LATE_TWICE,
    ONE_LANE,
    ROWS_WITH_P,
    SWAP_AB_DELETED,
    SWAP_AB_HARMLESS,
    TURNS,
    V_WITH_P,
    gathered,
    launches,
)

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

SAME_SPAN = "the first one: the wait for sinks was for the same span"
SWAP_AB_PIECES_DELETED = {
    **SWAP_AB_DELETED,
    ("mbarrier.try_wait", "told_index"): (1, SAME_SPAN),
    ("bar.warp", "arrive_warp"): (
        4,
        f"what is said of a tile: {ONE_LANE}; Q and V were read by products, which the whole "
        "warpgroup has waited for; Q of a token without keys is released unread",
    ),
    ("bar.sync", "sync"): (
        6,
        "behind the sinks, before the sums (2) and before the largest scores (2), of pieces and of "
        "whole tokens: as without pieces; behind those of a piece: the semaphore's barrier follows",
    ),
}
ABANDONED = (
    "the first split to end abandons its slice here, in every launch: its arrival and the "
    "counter's `or` behind it release the same; in swap-AB, where a split waits in time, the "
    "arrival is noticed"
)
DELETED = {
    "swap_ab_pieces": SWAP_AB_PIECES_DELETED,
    # Of the two kernels the one of launches with splits.
    "heads_m_pieces": {
        **{
            place: (count // 2, why)
            for place, (count, why) in REDUNDANT["hopper"].items()
            if place[0].startswith("wgmma")
        },
        ("griddepcontrol.launch_dependents", "_load"): (1, LAUNCH),
        ("griddepcontrol.wait", "gather"): (1, LAUNCHES_IN_ORDER),
        ("mbarrier.test_wait", "_has_landed"): (1, HINT),
        ("mbarrier.test_wait", "_issue_scores"): (1, HINT),
        ("fence.proxy", "_multiply_keys"): (1, FENCED_TWICE),
        ("fence.proxy", "_multiply_tiles"): (1, V_WITH_P),
        ("mbarrier.try_wait", "_multiply_tiles"): (3, f"{V_WITH_P}; {TURNS} (2)"),
        ("bar.warp", "arrive_warp"): (
            11,
            f"what is said of a tile (2): {ONE_LANE}; PV's turns (4) hand nothing over; what was "
            "read of Q and of V was read by products, which the whole warpgroup has waited for; Q "
            f"of a token without keys is released unread; {ROWS_WITH_P} (2)",
        ),
    },
}
WEAKER = {
    # A span's place is read for the work tile's number before the rest: its release is noticed.
    "swap_ab_pieces": {
        **gathered(SWAP_AB_HARMLESS, "arrive_warp"),
        ("mbarrier.try_wait", "told_index", "relaxed"): (1, SAME_SPAN),
    },
    "heads_m_pieces": {
        ("atom.global", "__init__", "acquire"): HARMLESS["few"]["atom.global", "", "acquire"],
        ("atom.global", "__init__", "cluster"): HARMLESS["few"]["atom.global", "", "cluster"],
        ("atom.global", "__init__", "release"): (1, ABANDONED),
        ("red.release", "arrive", "relaxed"): (1, ABANDONED),
        ("fence.proxy", "_multiply_keys", "global"): (1, FENCED_TWICE),
        ("fence.proxy", "_multiply_tiles", "global"): (1, V_WITH_P),
        ("mbarrier.arrive", "_load_q_smem", "relaxed"): (1, EXPECTS),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (
            8,
            "what is said of a tile (2): the arrival of the other half's copies comes behind the "
            f"words; PV's turns (4) hand nothing over; {ROWS_WITH_P} (2)",
        ),
        ("mbarrier.test_wait", "_has_landed", "relaxed"): (2, HINT),
        ("mbarrier.test_wait", "_issue_scores", "relaxed"): (1, HINT),
        ("mbarrier.try_wait", "_multiply_tiles", "relaxed"): (3, f"{V_WITH_P}; {TURNS} (2)"),
        ("mbarrier.try_wait", "score", "relaxed"): (1, ROWS_WITH_P),
    },
}
# What no launch here runs, likewise.
UNREACHED = {
    "heads_m_pieces": {
        ("cp.async", "tma_prefetch"): (2, "a hint, of tokens with several head tiles"),
        ("bar.warp", "arrive_warp"): (1, LATE_TWICE),
        ("mbarrier.arrive", "arrive_warp"): (1, LATE_TWICE),
    },
}
UNREACHED_WEAKER = {
    "heads_m_pieces": {("mbarrier.arrive", "arrive_warp", "relaxed"): (1, LATE_TWICE)},
}


@pytest.mark.parametrize("name", DELETED)
def test_all_deletions_are_noticed(name: str) -> None:
    check_deleted(*launches(name), DELETED[name], UNREACHED.get(name))


@pytest.mark.parametrize("name", WEAKER)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    check_weaker(*launches(name), WEAKER[name], UNREACHED_WEAKER.get(name))
