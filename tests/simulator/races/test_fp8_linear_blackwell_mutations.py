"""Deleting any one synchronisation instruction of Blackwell's linears, or weakening any one of
their qualifiers by a step, is noticed."""

from __future__ import annotations

from functools import partial

import pytest

from dsv4.testing.fp8_linear import Case
from dsv4.testing.grouped_linear import Case as GroupedCase
from dsv4.testing.harness import SCHEDULES
from dsv4.testing.merged_linear import Case as MergedCase
from tests.simulator.helpers import linears
from tests.simulator.helpers.changes import Listed, check_deleted, check_weaker
from tests.simulator.races.test_fp8_linear_mutations import EXPECTS, FIRST, LAUNCH

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

LOADED = "what was read of sums is there for the whole warp: its loads end together"
PARTS = "the parts that the first warp waits for were sent by all warps, which had read their sums"
ENDS = "every warp has read its sums, and what follows a barrier of them reads none"
COMMON = {
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "store_tiles"): (1, FIRST),
    ("griddepcontrol.wait", "load"): (1, FIRST),
    ("griddepcontrol.wait", "fill"): (1, FIRST),
    ("bar.warp", "arrive_warp"): (1, LOADED),
    ("tcgen05.fence::before_thread_sync", "store_tiles"): (1, ENDS),
}
CLUSTERS = {**COMMON, ("bar.sync", "store_tiles"): (1, PARTS)}
WEIGHTS = {("mbarrier.arrive", "_load_weights", "relaxed"): (2, EXPECTS)}
SENT = {**WEIGHTS, ("mbarrier.arrive", "_expect_parts", "relaxed"): (1, EXPECTS)}
WITHOUT_SCALES = {place: why for place, why in COMMON.items() if place[1] != "fill"}
NO_OUTPUTS = (
    "outputs, which the launch before does not touch: it quantises what this one multiplies"
)
# Behind the launch that quantises: its wait is the first, and the loads' is needed.
STREAMED = {
    ("griddepcontrol.launch_dependents", "kernel"): (1, LAUNCH),
    ("griddepcontrol.launch_dependents", "run"): (1, LAUNCH),
    ("griddepcontrol.wait", "kernel"): (1, FIRST),
    ("griddepcontrol.wait", "store_tiles"): (1, NO_OUTPUTS),
    ("bar.warp", "arrive_warp"): (1, LOADED),
    ("tcgen05.fence::before_thread_sync", "store_tiles"): (1, ENDS),
}


def both_kinds(listed: Listed, *apart: str) -> Listed:
    """What a merged linear has of a kernel: once for each kind of weights, but for what is `apart`
    in functions of FP8 weights or of the launch before."""
    return {
        place: (count if place[1] in apart else 2 * count, why)
        for place, (count, why) in listed.items()
    }


MERGED = both_kinds(COMMON, "fill")
MERGED_WEIGHTS = {place: (2 * count, why) for place, (count, why) in WEIGHTS.items()}
MAXIMA = "the barrier of the last tile's maxima: every warp has read its sums"
KEYS = {
    ("ld.relaxed", "write_rows", "cluster"): (
        1,
        "a key, which the last CTA reads: the counter's atomic has acquired every maximum",
    ),
}
CODES = partial(Case, x_dtype="float8_e4m3fn")
MERGED_OF = partial(MergedCase, in_features=512, weights=linears.MERGED)
ONE_SLICE = 32768  # rows of a configuration

# Subject, what is not missed and what may be weaker: by instruction, the kernel's function and the
# new qualifier, how many of them, and why.
KERNELS = {
    "alone": (partial(linears.blackwell_fp8, CODES(19, 512, 264), ONE_SLICE, 0), COMMON, WEIGHTS),
    "clusters": (partial(linears.blackwell_fp8, CODES(19, 1024, 136), 136, 0), CLUSTERS, SENT),
    "quantised": (partial(linears.blackwell_fp8, Case(11, 1024, 136), 136, 0), CLUSTERS, SENT),
    # One CTA sums all of K for two tiles of tokens.
    "wide": (partial(linears.blackwell_fp8, CODES(150, 512, 264), ONE_SLICE, 3), COMMON, WEIGHTS),
    # Three groups of rows, two terms of each activation.
    "grouped, quantised": (
        partial(linears.blackwell_grouped, GroupedCase(11, 512, 256, 3), 0), COMMON, WEIGHTS,
    ),
    "grouped, streamed": (
        partial(linears.blackwell_grouped, GroupedCase(35, 512, 256, 3), 1), STREAMED, WEIGHTS,
    ),
    "merged, quantised": (
        partial(linears.blackwell_merged, MERGED_OF(19), 0), MERGED, MERGED_WEIGHTS,
    ),
    "merged, codes": (
        partial(linears.blackwell_merged, MERGED_OF(35, has_codes=True), 0),
        MERGED,
        MERGED_WEIGHTS,
    ),
    # bf16 weights begin behind the launch that quantises for the others, too.
    "merged, wide": (
        partial(linears.blackwell_merged, MERGED_OF(150), 4),
        {
            **both_kinds(STREAMED, "kernel"),
            ("griddepcontrol.wait", "load"): (
                1,
                "of bf16 weights: what they are multiplied with no launch here writes",
            ),
        },
        MERGED_WEIGHTS,
    ),
    "best rows": (
        partial(linears.blackwell_argmax, 35, 0),
        {**WITHOUT_SCALES, ("bar.sync", "store_tiles"): (1, MAXIMA)},
        {**WEIGHTS, **KEYS},
    ),
    "promoted": (
        partial(linears.blackwell_fp8, CODES(19, 512, 264, scale_dtype="float32"), ONE_SLICE, 0),
        COMMON,
        WEIGHTS,
    ),
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
