"""Compiled experts and routers, and the launches that must notice a change of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from unittest import mock

from dsv4.kernels.moe.plan import tilings
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device
from dsv4.testing import moe
from dsv4.testing.harness import Call, Outcome, Simulator, compiler_options
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from dsv4.testing.moe_router import RouterCase, RouterInputs, assert_routed
from tests.simulator.helpers.mutations import Run
from tests.simulator.helpers.subjects import FEW_SMS, SEED, Subject, run_of_call, subject_of_calls

RAW = 40  # exponents of a row's FP4 groups: further apart than those of FP8 codes
# Three tiles of tokens, one of them of a single expert, on one SM: rings wrap.
EXPERTS = moe.Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10)
# Tilings: a launch for each product; one launch for both; the same with tall tiles, which leave
# codes of h, of up to 8 tokens and up to 16.
APART, JOINT, TALL, CODED = range(4)
# Where CTAs share the tiles out, they wait for h.
EXPERTS_SMS = {APART: (1,), JOINT: (8, 1), TALL: (8, 1), CODED: (8, 1)}
# Stages of tall tiles are long; tiles of more than eight tokens have code of their own.
CASES = {
    TALL: replace(EXPERTS, hidden=512),
    CODED: replace(EXPERTS, tokens=19, live=18, hidden=512, has_missing=False),
}
# By tokens and tiling. All tiles that a CTA of the gate takes, two slices one after the other, a
# last CTA of the selection that sorts for all, in two batches a warp; and one that has all tokens.
ROUTER, ROUTER_LAUNCHES = RouterCase(90, 1024, top_k=7), ((90, (1, 8)), (3, (1, 1)))


@cache
def experts(
    tiling: int = APART, dtype: str = EXPERTS.expert_dtype, spread: int = EXPERTS.spread
) -> Subject:
    """A tiling alone: the others would take longer to compile and to read."""
    from dsv4.kernels.moe.sm90 import experts

    case = replace(CASES.get(tiling, EXPERTS), expert_dtype=dtype, spread=spread)
    inputs = moe.Inputs.make(case, SEED)
    config = inputs.case.config
    chosen = tilings(config)[tiling]
    with mock.patch.object(experts, "tilings", lambda config: (chosen,)):
        compiled = experts.build(config, compiler_options("sm_90a", has_lines=True))
    makes = [partial(inputs.experts_call, 0, sms, chosen.tokens) for sms in EXPERTS_SMS[tiling]]
    return subject_of_calls(compiled, makes, partial(_check_experts, inputs))


# Tiles of so many tokens have the code of those of 64 (one CTA) and of 128 (two of a cluster), and
# fewer columns; rings go round within a tile. Three tiles of one expert and of the shared one on
# two CTAs, and CTAs that begin with one of a routed expert.
WIDE_TOKENS, WIDE_STAGES = 32, 3
COLUMNS = ("tokens", "alone_tokens", "shared_tokens")  # of a tiling's tiles
WIDE_EXPERTS = moe.Case(66, 512, 384, 3, 2, one_expert=True, live=65)
WIDE_LAUNCHES = ((66, FEW_SMS), (8, 8))  # tokens, SMs


@cache
def wide_experts(
    dtype: str,
    sharing: int,
    spread: int = WIDE_EXPERTS.spread,
    is_row_packed: bool = False,
    ctas_per_sm: int = 1,
) -> Subject:
    """The tiling of many tokens, of clusters of so many CTAs."""
    from dsv4.kernels.moe import wide_plan
    from dsv4.kernels.moe.sm90 import experts

    case = replace(WIDE_EXPERTS, expert_dtype=dtype, spread=spread, is_row_packed=is_row_packed)
    inputs = moe.Inputs.make(case, SEED)
    config = inputs.case.config
    tiling = tilings(config)[-1]
    tokens = dict.fromkeys(COLUMNS, WIDE_TOKENS)
    chosen = replace(tiling, **tokens, stages=WIDE_STAGES, ctas_per_sm=ctas_per_sm)
    # Tokens of tiles with the most columns are shared.
    columns = {tokens: (tokens,) for tokens in (WIDE_TOKENS, 2 * WIDE_TOKENS)[: 3 - sharing]}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(wide_plan, "COLUMNS", columns))
        stack.enter_context(mock.patch.object(experts, "tilings", lambda config: (chosen,)))
        compiled = experts.build(config, compiler_options("sm_90a", has_lines=True))
    return Subject(compiled, partial(_runs_of_experts, inputs, WIDE_LAUNCHES, WIDE_TOKENS))


# Several turns of one CTA; and of CTAs that share the tiles out, which wait for h of others.
BF16_EXPERTS_SMS = {APART: 1, JOINT: 2}
# Of the products that are a launch each: both kinds of tiles, with few columns.
BF16_TOKENS = 16
BF16_EXPERTS = {
    "nvfp4": moe.Case(10, 512, 384, 32, 2, expert_dtype="nvfp4", one_expert=True, live=9),
    "bfloat16": moe.Case(
        10, 512, 384, 32, 2, expert_dtype="bfloat16", shared_dtype="bfloat16", one_expert=True,
        live=9,
    ),
}  # fmt: skip
OTHERS = 2  # that share the tokens out beside the one that has all


@cache
def bf16_experts(dtype: str, kind: int = APART) -> Subject:
    """A layer whose experts are multiplied in bf16: a launch for each product, or one."""
    from dsv4.kernels.moe.sm90 import bf16_experts, layer

    inputs = LayerInputs.make(BF16_EXPERTS[dtype], SEED)
    inputs.bias[:OTHERS] += 500
    config = MOE.compiled_config(inputs.config, "sm_90a")
    own = tilings(inputs.case.config)
    index = next(i for i, tiling in enumerate(own) if tiling.is_joint == (kind == JOINT))
    chosen = own[index]
    if kind == APART:
        chosen = replace(chosen, **dict.fromkeys(COLUMNS, BF16_TOKENS))
    with mock.patch.object(bf16_experts, "tilings", lambda config: (chosen,)):
        compiled = layer.build(config, compiler_options("sm_90a", has_lines=True))

    def make() -> Call:
        call = inputs.call_tiled(index, Device("sm_90a", BF16_EXPERTS_SMS[kind]))
        # The tiling is the only one that is compiled.
        call.options.update(tiling=0, group_tokens=chosen.tokens)
        return call

    return subject_of_calls(compiled, [make], partial(_check_layer, inputs))


# Several turns of a pair of CTAs; CTAs that begin with a tile of the shared expert whose weights
# are known, or are not, and with one of a routed expert.
BLACKWELL_EXPERTS = ((11, 1), (11, 8), (3, 16))  # tokens, SMs
# Two tiles of one expert and of the shared one.
MANY_BLACKWELL_EXPERTS = ((70, 1), (70, 8), (3, 16))


@cache
def blackwell_experts(
    dtype: str = EXPERTS.expert_dtype, scale_dtype: str = EXPERTS.scale_dtype, tiling: int = 0
) -> Subject:
    """The tiling of few tokens, or of many."""
    from dsv4.kernels.moe.sm100 import experts, plan

    launches = (BLACKWELL_EXPERTS, MANY_BLACKWELL_EXPERTS)[tiling]
    tokens = launches[0][0]
    case = replace(EXPERTS, expert_dtype=dtype, scale_dtype=scale_dtype, is_tiled=True)
    inputs = moe.Inputs.make(replace(case, tokens=tokens, live=tokens - 1), SEED)
    chosen = plan.tilings(inputs.case.config)[tiling]
    with mock.patch.object(experts, "tilings", lambda config: (chosen,)):
        options = compiler_options("sm_100a", has_lines=True)
        compiled = experts.build(inputs.case.config, options)
    return Subject(compiled, partial(_runs_of_experts, inputs, launches, chosen.tokens))


# As above, and one token: the products are launches of a layer, behind its router.
PACKED_EXPERTS = (*BLACKWELL_EXPERTS, (1, 1))
PACKED = moe.Case(
    11, 512, 384, 32, 2, expert_dtype="nvfp4", is_tiled=True, one_expert=True, live=10
)  # fmt: skip


@cache
def packed_experts() -> Subject:
    """A layer in NVFP4, the tiling of few tokens."""
    from dsv4.kernels.moe.sm100 import experts, layer, plan

    inputs = LayerInputs.make(PACKED, SEED)
    config = MOE.compiled_config(inputs.config, "sm_100a")
    with mock.patch.object(experts, "tilings", lambda config: plan.tilings(config)[:1]):
        compiled = layer.build(config, compiler_options("sm_100a", has_lines=True))
    return Subject(compiled, partial(runs_of_layer, inputs, "sm_100a", PACKED_EXPERTS))


def hopper_layer(inputs: LayerInputs, tiling: int):
    """A layer compiled with one tiling alone."""
    name = "dsv4.kernels.moe.sm90.experts.tilings"
    with mock.patch(name, lambda config: tilings(config)[tiling : tiling + 1]):
        return OpKernels(MOE, Simulator("sm_90a", has_lines=True)).compile(inputs.config)


def runs_of_layer(
    inputs: LayerInputs, arch: str, launches: Sequence[tuple[int, int]], schedule: str
) -> list[Run]:
    """Launches of the first tokens on so many SMs."""
    found = []
    for tokens, sms in launches:
        own = inputs.first(tokens)
        make = partial(own.call_tiled, 0, Device(arch, sms))
        found.append(run_of_call(make, partial(_check_layer, own), schedule))
    return found


def _check_layer(inputs: LayerInputs, found: Outcome) -> None:
    assert_layer_close(found, inputs)


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
def router(arch: str = "sm_90a") -> Subject:
    """Further loads of a thread are copies of an unrolled loop."""
    from dsv4.kernels.moe import select
    from dsv4.kernels.moe.router import build

    inputs = RouterInputs.make(ROUTER, SEED)
    with mock.patch.object(select, "BATCH", 1):
        compiled = build(ROUTER.config, compiler_options(arch, has_lines=True))

    def runs(schedule: str) -> list[Run]:
        found = []
        for tokens, tiling in ROUTER_LAUNCHES:
            own = inputs.first(tokens)
            found.append(
                run_of_call(partial(own.call, tiling), partial(_check_routed, own), schedule)
            )
        return found

    return Subject(compiled, runs)


def _check_routed(inputs: RouterInputs, found: Outcome) -> None:
    assert_routed(found, inputs)


# Tiles without tokens, pairs of several runs, a ring that wraps. Each warp of a run has so many
# tokens, whose pairs are two batches; further loads of a thread are copies of an unrolled loop.
ROUTER_MANY, ROUTER_MANY_TILING = RouterCase(90, 1024, top_k=7, live=81), (1, 1)
ROUNDS = 5


@cache
def router_of_many(arch: str = "sm_90a") -> Subject:
    """The gate and the selection of many tokens."""
    from dsv4.kernels.moe import select, select_many
    from dsv4.kernels.moe.router import build_many

    inputs = RouterInputs.make(ROUTER_MANY, SEED)
    with ExitStack() as stack:
        for module in (select, select_many):
            stack.enter_context(mock.patch.object(module, "BATCH", 1))
        stack.enter_context(mock.patch.object(select_many, "run_rounds", lambda *_: ROUNDS))
        compiled = build_many(ROUTER_MANY.config, compiler_options(arch, has_lines=True))
    make = partial(inputs.call, ROUTER_MANY_TILING)
    return subject_of_calls(compiled, [make], partial(_check_routed, inputs))
