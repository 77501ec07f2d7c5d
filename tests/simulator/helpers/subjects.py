"""Compiled kernels of the package, and the launches that must notice a change of them: several
tiles of everything, few CTAs, so that rings wrap and each CTA has several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from dsv4.kernels.attention.paged_plan import workspace_size
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.testing import moe, paged_attention
from dsv4.testing.attention import assert_attention_close
from dsv4.testing.harness import Call, Outcome, compiler_options
from dsv4.testing.moe_router import RouterCase, RouterInputs, assert_routed
from tests.simulator.helpers.mutations import Run

SEED = 1


class Subject(NamedTuple):
    """A compiled kernel, and its launches under a schedule."""

    compiled: Any
    runs: Callable[[str], list[Run]]


def run_of_call(
    make: Callable[[], Call], check: Callable[[Outcome], None], schedule: str = "eager"
) -> Run:
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

    return Run(prepare, correct, schedule)


def _subject(
    compiled: Any, makes: Sequence[Callable[[], Call]], check: Callable[[Outcome], None]
) -> Subject:
    return Subject(
        compiled, lambda schedule: [run_of_call(make, check, schedule) for make in makes]
    )


# ---- experts and router --------------------------------------------------------------------------
# Three tiles of tokens, one of them of a single expert, on one SM: rings wrap.
EXPERTS = moe.Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10)
# Two CTAs of the selection, four tiles of a CTA of the gate, two slices one after the other.
ROUTER, ROUTER_TILING = RouterCase(27, 1024), (1, 4)


@cache
def experts() -> Subject:
    from dsv4.kernels.moe.sm90.experts import build

    inputs = moe.Inputs.make(EXPERTS, SEED)
    compiled = build(EXPERTS.config, compiler_options("sm_90a", has_lines=True))
    make = partial(inputs.experts_call, 0, 1, 8)
    return _subject(compiled, [make], lambda found: moe.assert_experts_close(found, inputs))


@cache
def router() -> Subject:
    from dsv4.kernels.moe.router import build

    inputs = RouterInputs.make(ROUTER, SEED)
    compiled = build(ROUTER.config, compiler_options("sm_90a", has_lines=True))
    make = partial(inputs.call, ROUTER_TILING)
    return _subject(compiled, [make], lambda found: assert_routed(found, inputs))


# ---- attention over pages ------------------------------------------------------------------------
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "has_factor": True, "wild": True}
# Splits and CTAs. All work on one CTA; fewer CTAs than splits, which then cannot wait for each
# other; all at once.
PAGED_LAUNCHES = ((1, 1), (3, 3), (3, 132))
PAGED = {
    "swap_ab": paged_attention.Case(3, 1, 8, 64, "bf16", 40, 300, 53, 2, **OPTIONS),
}


@cache
def paged(name: str) -> Subject:
    from dsv4.kernels.attention.sm90.paged import build

    case = PAGED[name]
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
    return _subject(compiled, [partial(make, *launch) for launch in PAGED_LAUNCHES], check)
