"""The experts' kernels: in the simulator, of both architectures, with races and schedules, and on a
Hopper GPU.

Every tiling gives the same bits, close to the reference; each product is compared with what the
kernel itself had before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.ops.moe.layout import EMPTY_EXPONENT
from dsv4.ops.moe.op import PLANS
from dsv4.testing.harness import (
    Device,
    Outcome,
    Simulator,
    Target,
    assert_clean,
    missed_synchronisation,
    run_all,
)
from dsv4.testing.moe import Case, Inputs, assert_experts_close

pytestmark = pytest.mark.stage("moe")

FEW_SMS = 2  # a CTA has several tiles, its ring wraps
SMALL = {"hidden": 256, "inner": 384, "experts": 6, "top_k": 2}
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(
    scope="module",
    params=[
        "sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", marks=HOPPER),
    ],
)  # fmt: skip
def target(request: pytest.FixtureRequest) -> Target:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else Simulator(request.param)


def module_of(config: ExpertsConfig) -> ModuleType:
    """The kernels' module, by the order of the weights."""
    if config.scale_form == "tiled":
        from dsv4.kernels.moe.sm100 import experts
    else:
        from dsv4.kernels.moe.sm90 import experts

    return experts


def build(config: ExpertsConfig, options: str):
    return module_of(config).build(config, options)


@dataclass(frozen=True)
class BuildOne:
    """Build of one tiling's kernels, which is then the only one: all of them take minutes.

    Attributes:
        tiling: index among all.
    """

    tiling: int

    def __call__(self, config: ExpertsConfig, options: str):
        module = module_of(config)
        found = module.tilings(config)[self.tiling]
        with patch.object(module, "tilings", lambda config: (found,)):
            return module.build(config, options)


def inputs_of(target: Target, case: Case, seed: int) -> Inputs:
    """Of a case, whose weights are those of the target's kernels."""
    return Inputs.make(replace(case, is_tiled=target.arch != "sm_90a"), seed)


def tilings(target: Target, config: ExpertsConfig) -> tuple:
    return PLANS[target.arch].tilings(config)


def choose(target: Target, case: Case, tokens: int) -> int:
    return PLANS[target.arch].choose(case.config, tokens, case.experts)


def run(
    target: Target,
    inputs: Inputs,
    tiling: int,
    seed: int = 0,
    num_sms: int = FEW_SMS,
    schedules: int | None = 1,
) -> Outcome:
    """Run one tiling in the first few schedules, all for None."""
    config = inputs.case.config
    return run_all(
        target,
        target.compile(BuildOne(tiling), config),
        lambda: inputs.experts_call(0, num_sms, tilings(target, config)[tiling].tokens).to(
            target.device
        ),
        seed,
        target.schedules[:schedules],
    )


def check_every_tiling(target: Target, inputs: Inputs, seed: int, **options) -> Outcome:
    """Compare one tiling with the reference, and all others with it bit for bit."""
    found = tilings(target, inputs.case.config)
    outcomes = [run(target, inputs, tiling, seed, **options) for tiling in range(len(found))]
    assert_experts_close(outcomes[0], inputs)
    for tiling, outcome in zip(found, outcomes):
        assert torch.equal(outcomes[0]["y"].nan_to_num(7.0), outcome["y"].nan_to_num(7.0)), tiling
    return outcomes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        # Experts without a token, ragged tiles, several tiles of one expert, padding.
        Case(19, **SMALL, one_expert=True, has_missing=True, live=17),
        Case(21, 640, 256, 5, 3),
        Case(70, one_expert=True),
    ],
    ids=str,
)
def test_every_tiling_in_every_schedule(target, case, seed) -> None:
    check_every_tiling(target, inputs_of(target, case, seed), seed, schedules=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(5, **SMALL, spread=20),
        Case(5, **SMALL, expert_dtype="fp8", scale_dtype="float32", out_dtype="float32"),
        Case(12, **SMALL, expert_dtype="fp8"),
    ],
    ids=str,
)
def test_other_weights(target, case, seed) -> None:
    inputs = inputs_of(target, case, seed)
    for tiling in range(min(2, len(tilings(target, inputs.case.config)))):
        assert_experts_close(run(target, inputs, tiling, seed), inputs)


def vary_rows(inputs: Inputs) -> None:
    """Take half of the rows' weights times 1/2: of w1 and w3 the upper halves of their least
    exponents, which words of other k blocks hold than the lower ones, differ. Leave groups of a row
    without values, and a whole row."""
    for weight in inputs.routed.values():
        exponents = weight.scale.view(torch.uint8)
        exponents -= (torch.arange(exponents.shape[-2]) % 2).byte()[:, None]
    least = inputs.routed["w1"].scale.view(torch.uint8).amin(-1)
    assert len((least >> 4).unique()) > 1 and len((least & 0xF).unique()) > 1, least.unique()
    for weight in inputs.routed.values():
        groups = weight.codes.unflatten(-1, (weight.scale.shape[-1], -1))
        for row, places in ((3, slice(2, 6)), (17, slice(None))):
            groups[:, row, places] = 0
            weight.scale.view(torch.uint8)[:, row, places] = EMPTY_EXPONENT


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [5, 70])
def test_one_exponent_a_row_changes_no_bit(tokens, seed) -> None:
    """A tile's sums are multiplied by the row's scale, not each k block; groups are decoded from
    other words."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    target = Simulator("sm_90a")
    case = Case(tokens, **SMALL, one_expert=True, has_missing=True)
    by_block, by_row = (
        inputs_of(target, replace(case, is_row_packed=is_row_packed), seed)
        for is_row_packed in (False, True)
    )
    for inputs in (by_block, by_row):
        vary_rows(inputs)
    expected = run(target, by_block, choose(target, case, tokens), seed)
    assert_experts_close(expected, by_block)
    for tiling in range(len(tilings(target, case.config))):
        found = run(target, by_row, tiling, seed)
        assert_experts_close(found, by_row)
        assert torch.equal(found["y"], expected["y"]), tiling


@pytest.mark.slow
def test_a_token_has_the_same_bits_among_any_number(target, seed) -> None:
    inputs = inputs_of(target, Case(33, **SMALL), seed)
    case = inputs.case
    all_tokens = run(target, inputs, choose(target, case, 33), seed)["y"]
    for tokens in (1, 8, 9):
        found = run(target, inputs.first(tokens), choose(target, case, tokens), seed)["y"]
        assert torch.equal(found, all_tokens[:tokens]), f"T = {tokens}"


def test_rows_that_are_not_finite_touch_no_other(target, seed) -> None:
    case = Case(10, **SMALL, has_special_rows=True)
    inputs = inputs_of(target, case, seed)
    outcome = run(target, inputs, 0, seed)
    assert_experts_close(outcome, inputs)
    ordinary = replace(
        inputs, case=replace(inputs.case, tokens=2),
        x=inputs.x[4::5], ids=inputs.ids[4::5], weights=inputs.weights[4::5],
    )  # fmt: skip
    assert torch.equal(run(target, ordinary, 0, seed)["y"], outcome["y"][4::5])


def test_without_a_live_token_the_result_is_zero(target, seed) -> None:
    inputs = inputs_of(target, Case(3, **SMALL, live=0), seed)
    assert (run(target, inputs, 0, seed)["y"] == 0).all()


@pytest.mark.slow
def test_every_barrier_and_fence_is_reached(seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    simulator = Simulator("sm_90a")
    # The shared expert has tiles that are asked for early, and others; the last ones reach every
    # copy behind the unrolled ones. Many tokens: groups of all kinds of tiles. Codes of h: several
    # tiles of an expert and of the shared one, the last with copies behind the unrolled ones, too.
    inputs = inputs_of(simulator, Case(45, **SMALL, one_expert=True), seed)
    several = inputs_of(simulator, Case(80, **SMALL | {"experts": 8}, one_expert=True), seed)
    many = [
        inputs_of(simulator, Case(tokens, **SMALL, is_graded=True), seed)
        for tokens in (160, 140, 124)
    ]
    config = inputs.case.config
    compiled = simulator.compile(build, config)
    outcomes = []
    for i, tiling in enumerate(tilings(simulator, config)):
        launches = [inputs, *(inputs.first(n) for n in (44, 43, 42))]
        if tiling.is_wide:
            launches = many
        elif tiling.rounds:
            launches = [inputs, *(several.first(n) for n in (80, 76, 70))]
        for own in launches:
            call = own.experts_call(i, FEW_SMS, tiling.tokens)
            outcomes.append(simulator.run(compiled, call))
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)


@pytest.mark.slow
def test_every_barrier_and_fence_of_blackwell_is_reached(seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    simulator = Simulator("sm_100a")
    inputs = inputs_of(simulator, Case(70, **SMALL, one_expert=True), seed)
    config = inputs.case.config
    compiled = simulator.compile(build, config)
    # The first tile of a CTA is one of the shared expert, whose weights are known, or are not, or
    # one of a routed expert.
    launches = ((70, 2), (70, 8), (3, 16))
    outcomes = [
        simulator.run(compiled, inputs.first(tokens).experts_call(i, sms, tiling.tokens))
        for i, tiling in enumerate(tilings(simulator, config))
        for tokens, sms in launches
    ]
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)


def test_few_tokens_on_blackwell(seed) -> None:
    """The cheapest to compile of its kernels; the others of this module are slow."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    target = Simulator("sm_100a")
    inputs = inputs_of(target, Case(9, 128, 256, 4, 2, one_expert=True, live=8), seed)
    assert_experts_close(run(target, inputs, 0, seed), inputs)
