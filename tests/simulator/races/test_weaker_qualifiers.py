"""Weakening any one qualifier of a kernel by a step is noticed: experts, router, attention
over pages, and kernels that have none.

One schedule is enough: a weaker qualifier changes nothing but the checker's order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dsv4.kernels.attention.paged_plan import workspace_size
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.testing import kv_insert, moe, paged_attention, rms_norm_fp8
from dsv4.testing.attention import assert_attention_close
from dsv4.testing.harness import Call, Outcome, compiler_options
from dsv4.testing.moe_router import RouterInputs, assert_routed
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.weaker import check_weaker, weakenings_of
from tests.simulator.races import test_router_mutations

pytestmark = pytest.mark.stage("simulator")

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

SEED = 1
Subject = tuple[Any, list[Run]]  # compiled kernels, and the launches that must notice
EXPECTS = "the copies it expects complete with a release of their own, and are all it hands over"


def run_of_call(make: Callable[[], Call], check: Callable[[Outcome], None]) -> Run:
    """A launch whose tensors are new each time, and the check of what it left."""
    calls: list[Call] = []

    def prepare() -> tuple[tuple, dict]:
        calls.append(make().poisoned())
        return calls[-1].args, dict(calls[-1].options)

    def correct(positional: tuple, keywords: dict) -> bool:
        try:
            check(Outcome.of(calls[-1]))
        except AssertionError:
            return False
        return True

    return Run(prepare, correct)


# ---- experts and router --------------------------------------------------------------------------
# Three tiles of tokens, one of them of a single expert, on one SM: rings wrap.
EXPERTS = moe.Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10)
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


def experts() -> Subject:
    from dsv4.kernels.moe.sm90.experts import build

    inputs = moe.Inputs.make(EXPERTS, SEED)
    compiled = build(EXPERTS.config, compiler_options("sm_90a", has_lines=True))
    make = partial(inputs.experts_call, 0, 1, 8)
    return compiled, [run_of_call(make, lambda found: moe.assert_experts_close(found, inputs))]


def router() -> Subject:
    from dsv4.kernels.moe.router import build

    case, tiling = test_router_mutations.CASE, test_router_mutations.TILING
    inputs = RouterInputs.make(case, SEED)
    compiled = build(case.config, compiler_options("sm_90a", has_lines=True))
    make = partial(inputs.call, tiling)
    return compiled, [run_of_call(make, lambda found: assert_routed(found, inputs))]


# ---- attention over pages ------------------------------------------------------------------------
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True, "wild": True}
# All work on one CTA; fewer CTAs than splits, which then cannot wait for each other; all at once.
LAUNCHES = ((1, 1), (3, 3), (3, 132))
PAGED_SWAP_AB = paged_attention.Case(3, 1, 8, 64, "bf16", 40, 300, 53, 2, **OPTIONS)
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


def paged(case: paged_attention.Case) -> Subject:
    from dsv4.kernels.attention.sm90.paged import build

    config = SPARSE_FMHA_PAGED.compiled_config(case.config, "sm_90a")
    inputs = paged_attention.make_inputs(case, SEED)
    o, lse, _ = inputs.expected()

    def make(splits: int, ctas: int) -> Call:
        scalars = (splits, ctas, case.config.sliding_window, case.config.ratio)
        call = inputs.call(scalars, workspace_size(case.config, {"T": case.tokens}, scalars))
        if splits > 1:
            # The largest scores would make it one split.
            call.options["max_logits"] = call.outputs.pop("max_logits")[:0]
        return call

    def check(found: Outcome) -> None:
        assert_attention_close(found["o"], o, found["lse"], lse)

    compiled = build(config, compiler_options("sm_90a", has_lines=True))
    return compiled, [run_of_call(partial(make, *launch), check) for launch in LAUNCHES]


# Subject, what goes unnoticed, and what no launch runs.
KERNELS = {
    "experts": (experts, EXPERTS_HARMLESS, {}),
    "router": (router, {}, {}),
    "paged swap-AB": (
        partial(paged, PAGED_SWAP_AB), PAGED_SWAP_AB_HARMLESS, PAGED_SWAP_AB_UNREACHED,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_all_weaker_qualifiers_are_noticed(name: str) -> None:
    make, harmless, unreached = KERNELS[name]
    check_weaker(*make(), harmless, unreached)


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
