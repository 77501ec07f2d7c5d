"""Deleting any one synchronisation instruction of the bf16 products of a merged linear is noticed.

The bodies of FP8 weights are those of `fp8_linear`, whose deletions have a test of their own.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial

import pytest

from dsv4.ops.runtime.backend import Device
from dsv4.simulator.ptx.entry import Instruction
from dsv4.testing.harness import SCHEDULES, compiler_options
from dsv4.testing.merged_linear import Case, Inputs, assert_merged_close
from tests.simulator.helpers.mutations import (
    Run,
    known_warnings,
    noticed,
    run_of,
    simulate_text,
    sync_instructions,
    without,
)
from tests.simulator.races.test_attention_mutations import places
from tests.simulator.races.test_fp8_linear_mutations import PRODUCTS, reached

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

NUM_SMS = 2  # clusters of each kind have several tiles
WEIGHTS = "72 float8_e8m0fnu bfloat16, 136 bfloat16 float32"
# By index of the tiling: the case, and what is not missed, how many of them, and why.
RESIDENT, WIDE = 0, -1
CASES = {RESIDENT: Case(19, 512, WEIGHTS), WIDE: Case(150, 512, WEIGHTS)}
REDUNDANT = {
    RESIDENT: {("bar.warp", "arrive_warp"): (4, PRODUCTS)},
    WIDE: {},
}


@cache
def kernel(tiling: int):
    """The compiled kernels, and the launches that must notice a deletion."""
    from dsv4.kernels.gemm.merged_plan import tilings
    from dsv4.kernels.gemm.sm90.merged_linear import build

    case = CASES[tiling]
    inputs = Inputs.make(case, 1)
    index = tiling % len(tilings(case.config))

    def check(positional: tuple, keywords: dict) -> None:
        found = {"out_0": positional[3], "plain_out_0": keywords["plain_out_0"]}
        assert_merged_close(found, inputs)

    def run(schedule: str) -> Run:
        device = Device("sm_90a", NUM_SMS)
        call = partial(inputs.call, device, tiling=index, num_sms=NUM_SMS)
        return run_of(call, check, schedule)

    compiled = build(case.config, compiler_options("sm_90a", has_lines=True))
    return compiled, [run(schedule) for schedule in SCHEDULES[:2]]


def of_bf16_products(instructions: list[Instruction]) -> list[tuple[Instruction, tuple[str, str]]]:
    """Those of `sum_unscaled_slice`, and all releases of stages, which share their function."""
    return [
        (ins, place)
        for ins, place in zip(instructions, places(instructions))
        if place[1] in ("sum_unscaled_slice", "arrive_warp")
    ]


@pytest.mark.parametrize("tiling", [RESIDENT, WIDE])
def test_all_deletions_are_noticed(tiling) -> None:
    compiled, runs = kernel(tiling)
    ptx = compiled.artifacts.PTX
    known = known_warnings(compiled, runs)
    report, _ = simulate_text(compiled, ptx, runs[0])
    candidates = of_bf16_products(reached(report, sync_instructions(ptx), ptx))
    assert candidates
    missed = [
        (ins, place)
        for ins, place in candidates
        if not noticed(compiled, without(ptx, ins), runs, known)
    ]
    expected = {place: count for place, (count, _) in REDUNDANT[tiling].items()}
    assert Counter(place for _, place in missed) == expected, "\n".join(
        ins.where() for ins, _ in missed
    )
