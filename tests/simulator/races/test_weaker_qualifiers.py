"""Weakening any one qualifier of a kernel by a step is noticed: experts, router, attention
over pages, linears, seam, compressor, and kernels that have none.

One schedule is enough: a weaker qualifier changes nothing but the checker's order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dsv4.testing import kv_insert, rms_norm_fp8
from dsv4.testing.harness import compiler_options
from tests.simulator.helpers import subjects
from tests.simulator.helpers.changes import check_weaker, weakenings_of

pytestmark = pytest.mark.stage("simulator")

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

EXPECTS = "the copies it expects complete with a release of their own, and are all it hands over"


# ---- experts and router --------------------------------------------------------------------------
EXPERTS_HARMLESS = {
    ("mbarrier.arrive", "_load_stage", "relaxed"): (6, EXPECTS),
    ("fence.proxy", "clear", "global"): (
        3,
        "zeros: the CTA's barrier tells every warp of them, and the fence behind a stage's codes, "
        "before the stage is handed over, is for all that its warp knows of",
    ),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (
        1,
        "tall tiles: the copies of codes and scales arrive at the stage by themselves, and the "
        "warp's arrival behind them hands nothing over",
    ),
}


# ---- attention over pages ------------------------------------------------------------------------
PAGED_SWAP_AB_HARMLESS = {
    ("mbarrier.arrive", "gather", "relaxed"): (1, EXPECTS),
    ("mbarrier.try_wait", "gather", "relaxed"): (
        1,
        "the span's place is free: each warp releases it before Q, whose release was waited for",
    ),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, "the span's release: Q's follows it"),
    ("mbarrier.try_wait", "compute", "relaxed"): (
        1,
        "the first one orders this launch after the one before it, and each run here begins with "
        "this one",
    ),
    ("atom.global", "__init__", "acquire"): (
        1,
        "the counter's `or`: the arrival before it has released all that the CTA stored",
    ),
    ("atom.global", "__init__", "cluster"): (
        1,
        "the counter's `and`: only the last to arrive makes it here, after it has acquired every "
        "other access",
    ),
}
NO_SPECULATION = "of a speculative first tile, which lists and tables of slots do not have"
PAGED_SWAP_AB_UNREACHED = {
    ("fence.proxy", "compute", "global"): (1, NO_SPECULATION),
    ("mbarrier.try_wait", "compute", "relaxed"): (1, NO_SPECULATION),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, NO_SPECULATION),
}


# On Blackwell; what the dense kernel has, too, is listed there with the same reasons.
HANDED_OVER_WITH_P = "S: the next product into this stage waits for the P made of it, and its fence"
WITH_S = (
    "words about a tile: they are written before its copies are asked for, and the softmax has "
    "waited for the product of what these brought"
)
PAGED_ONE_CTA_HARMLESS = {
    ("mbarrier.try_wait", "_load_q", "relaxed"): (
        1,
        "the only stage is free when it is first acquired",
    ),
    ("mbarrier.arrive", "_load_q", "relaxed"): (1, EXPECTS),
    ("mbarrier.arrive", "_load_rows", "relaxed"): (1, EXPECTS),
    ("mbarrier.try_wait", "_qk", "relaxed"): (
        3,
        "S: its first acquisition finds it free; later ones follow the wait for P two tiles "
        "before, which the softmax made from what this stage then held",
    ),
    ("mbarrier.arrive", "_load_scores", "relaxed"): (1, HANDED_OVER_WITH_P),
    ("mbarrier.try_wait", "softmax_warps", "relaxed"): (
        2,
        "P: every O is waited for, and with it the product that read this stage of P; O, to keep "
        "its phases in order: the wait before the next rescale, or at the end, is the one that "
        "acquires",
    ),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, WITH_S),
    ("mbarrier.try_wait", "receive", "relaxed"): (1, WITH_S),
}


# ---- linears, seam -------------------------------------------------------------------------------
def weights(copies: int) -> dict[tuple[str, str, str], tuple[int, str]]:
    """Arrivals that announce a stage of weights."""
    return {("mbarrier.arrive", "load_weights", "relaxed"): (copies, EXPECTS)}


# Two for each number of tokens a pass: streams, and what the mixture sends.
SEAM_HARMLESS = {("mbarrier.arrive", "expect", "relaxed"): (8, EXPECTS)}


# Subject, what goes unnoticed, and what no launch runs.
KERNELS = {
    "experts": (subjects.experts, EXPERTS_HARMLESS, {}),
    "router": (subjects.router, {}, {}),
    "paged swap-AB": (
        partial(subjects.paged, "swap_ab"), PAGED_SWAP_AB_HARMLESS, PAGED_SWAP_AB_UNREACHED,
    ),
    "paged, 1 CTA": (partial(subjects.paged, "one_cta"), PAGED_ONE_CTA_HARMLESS, {}),
    "plain linear, resident": (partial(subjects.plain, 11, 0), weights(4), {}),
    "plain linear, wide": (partial(subjects.plain, 150, -1), weights(2), {}),
    "grouped linear, resident": (partial(subjects.grouped, 11, 0), weights(4), {}),
    # Of both kinds of weights.
    "merged linear, resident": (partial(subjects.merged, 19, 0), weights(8), {}),
    "seam, Hopper": (partial(subjects.seam, "sm_90a"), SEAM_HARMLESS, {}),
    "seam, Blackwell": (partial(subjects.seam, "sm_100a"), SEAM_HARMLESS, {}),
    "compressor, Hopper": (partial(subjects.compressor, "sm_90a"), {}, {}),
    "compressor, Blackwell": (partial(subjects.compressor, "sm_100a"), {}, {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    make, harmless, unreached = KERNELS[name]
    compiled, runs = make()
    check_weaker(compiled, runs("eager"), harmless, unreached)


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
