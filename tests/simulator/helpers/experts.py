"""Compiled experts and routers, and the launches that must notice a change of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

from dsv4.kernels.moe.plan import Tiling, tilings
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device
from dsv4.testing import moe
from dsv4.testing.harness import Call, Outcome, compiler_options
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from dsv4.testing.moe_router import RouterCase, RouterInputs, assert_routed
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import SEED, Subject, run_of_call, subject_of_calls

# Three tiles of tokens, one of them of a single expert, on one SM: rings wrap.
EXPERTS = moe.Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10)
# Tiles of each kind, groups that begin at odd places; pairs of CTAs.
WIDE_EXPERTS = moe.Case(131, 256, 384, 4, 2, one_expert=True, live=130)
# Tilings: a launch for each product, one launch for both, many tokens.
APART, JOINT, WIDE = 0, 1, -1
# Where CTAs share the tiles out, they wait for h.
EXPERTS_SMS = {APART: (1,), JOINT: (8, 1)}
WIDE_LAUNCHES = ((90, 2), (131, 2))  # tokens, SMs
# Experts that are multiplied in bf16: tilings of one launch for both products, and of one for each.
BF16_JOINT, BF16_APART = 0, 2
BF16_EXPERTS = {
    "nvfp4": moe.Case(11, 512, 384, 32, 2, expert_dtype="nvfp4", one_expert=True, live=10),
    "bfloat16": moe.Case(
        5, 512, 384, 32, 2, expert_dtype="bfloat16", shared_dtype="bfloat16", live=4,
    ),
}  # fmt: skip
# Two CTAs of the selection, four tiles of a CTA of the gate, two slices one after the other.
ROUTER, ROUTER_TILING = RouterCase(27, 1024), (1, 4)


@cache
def experts(tiling: int = APART) -> Subject:
    """A tiling alone: the others would take longer to compile and to read."""
    inputs = moe.Inputs.make(EXPERTS, SEED)
    compiled, chosen = _compiled_experts(EXPERTS, tiling)
    makes = [partial(inputs.experts_call, 0, sms, chosen.tokens) for sms in EXPERTS_SMS[tiling]]
    return subject_of_calls(compiled, makes, partial(_check_experts, inputs))


@cache
def wide_experts() -> Subject:
    """The tiling of many tokens, in pairs of CTAs."""
    inputs = moe.Inputs.make(WIDE_EXPERTS, SEED)
    compiled, chosen = _compiled_experts(WIDE_EXPERTS, WIDE)
    return Subject(compiled, partial(_runs_of_experts, inputs, WIDE_LAUNCHES, chosen.tokens))


def _compiled_experts(case: moe.Case, tiling: int) -> tuple[Any, Tiling]:
    """The kernels with one tiling, and it."""
    from dsv4.kernels.moe.sm90 import experts

    chosen = tilings(case.config)[tiling]
    with mock.patch.object(experts, "tilings", lambda config: (chosen,)):
        return experts.build(case.config, compiler_options("sm_90a", has_lines=True)), chosen


@cache
def bf16_experts(dtype: str, tiling: int) -> Subject:
    """A layer with a tiling alone, on one SM."""
    from dsv4.kernels.moe.sm90 import bf16_experts, layer

    inputs = LayerInputs.make(BF16_EXPERTS[dtype], SEED)
    chosen = tilings(inputs.case.config)[tiling]
    with mock.patch.object(bf16_experts, "tilings", lambda config: (chosen,)):
        config = MOE.compiled_config(inputs.config, "sm_90a")
        compiled = layer.build(config, compiler_options("sm_90a", has_lines=True))

    def make() -> Call:
        call = inputs.call_tiled(tiling, Device("sm_90a", 1))
        call.options["tiling"] = 0
        return call

    return subject_of_calls(compiled, [make], lambda found: assert_layer_close(found, inputs))


# Several turns of a pair of CTAs; CTAs that begin with a tile of the shared expert whose weights
# are known, or are not, and with one of a routed expert.
BLACKWELL_EXPERTS = ((11, 1), (11, 8), (3, 16))  # tokens, SMs


@cache
def blackwell_experts() -> Subject:
    """The tiling of few tokens."""
    from dsv4.kernels.moe.sm100 import experts, plan

    inputs = moe.Inputs.make(replace(EXPERTS, is_tiled=True), SEED)
    with mock.patch.object(experts, "tilings", lambda config: plan.tilings(config)[:1]):
        options = compiler_options("sm_100a", has_lines=True)
        compiled = experts.build(inputs.case.config, options)
    return Subject(compiled, partial(_runs_of_experts, inputs, BLACKWELL_EXPERTS, 8))


def _runs_of_experts(
    inputs: moe.Inputs, launches: Sequence[tuple[int, int]], group_tokens: int, schedule: str
) -> list[Run]:
    """Launches of the first tokens."""
    found = []
    for tokens, sms in launches:
        own = inputs.first(tokens)
        make = partial(own.experts_call, 0, sms, group_tokens)
        found.append(run_of_call(make, partial(_check_experts, own), schedule))
    return found


def _check_experts(inputs: moe.Inputs, found: Outcome) -> None:
    moe.assert_experts_close(found, inputs)


@cache
def router() -> Subject:
    from dsv4.kernels.moe.router import build

    inputs = RouterInputs.make(ROUTER, SEED)
    compiled = build(ROUTER.config, compiler_options("sm_90a", has_lines=True))
    make = partial(inputs.call, ROUTER_TILING)
    return subject_of_calls(compiled, [make], lambda found: assert_routed(found, inputs))


# Tiles without tokens, pairs of several runs, a ring that wraps. Each warp of a run has so many
# tokens, whose pairs are two batches; further loads of a thread are copies of an unrolled loop.
ROUTER_MANY, ROUTER_MANY_TILING = RouterCase(90, 1024, top_k=7, live=81), (1, 1)
ROUNDS = 5


@cache
def router_of_many() -> Subject:
    """The gate and the selection of many tokens."""
    from dsv4.kernels.moe import select, select_many
    from dsv4.kernels.moe.router import build_many

    inputs = RouterInputs.make(ROUTER_MANY, SEED)
    with ExitStack() as stack:
        for module in (select, select_many):
            stack.enter_context(mock.patch.object(module, "BATCH", 1))
        stack.enter_context(mock.patch.object(select_many, "run_rounds", lambda tokens: ROUNDS))
        compiled = build_many(ROUTER_MANY.config, compiler_options("sm_90a", has_lines=True))
    make = partial(inputs.call, ROUTER_MANY_TILING)
    return subject_of_calls(compiled, [make], lambda found: assert_routed(found, inputs))
