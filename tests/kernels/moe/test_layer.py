"""A whole layer: router and experts in one call, in the simulator, of both architectures,
and on a Hopper GPU."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.arch import SM_90A
from dsv4.kernels.moe import plan
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.kernels.moe.layout import PANEL_ROWS
from dsv4.kernels.moe.scratch import scratch_bytes, sections
from dsv4.ops.moe.op import MOE, PLANS
from dsv4.ops.runtime.backend import Device as Planned
from dsv4.testing.harness import Call, Device, Outcome, Simulator, Target, run_all, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close, layer_config

pytestmark = pytest.mark.stage("moe")

HOPPER = [pytest.mark.gpu, pytest.mark.sm90]
FEW_SMS = 2


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a", pytest.param("cuda", marks=HOPPER)])
def target(request: pytest.FixtureRequest) -> Target:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else simulator(request.param)


def run(target: Target, inputs: LayerInputs, tiling: int, seed: int, schedules: int | None = 1):
    return run_all(
        target,
        OpKernels(MOE, target).compile(inputs.config),
        lambda: inputs.call_tiled(tiling, Planned(target.arch, FEW_SMS)).to(target.device),
        seed,
        target.schedules[:schedules],
    )


SMALL = Case(5, 512, 128, 32, 3, live=4)


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [1, None])
@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_every_step_is_close(target, is_hashed, schedules, seed) -> None:
    case = replace(SMALL, has_missing=is_hashed, is_tiled=target.arch != "sm_90a")
    inputs = LayerInputs.make(case, seed, is_hashed=is_hashed)
    assert_layer_close(run(target, inputs, 0, seed, schedules), inputs)


@pytest.mark.slow
def test_a_token_has_the_same_bits_in_every_tiling(target, seed) -> None:
    case = replace(SMALL, tokens=19, live=None, is_tiled=target.arch != "sm_90a")
    inputs = LayerInputs.make(case, seed)
    first = run(target, inputs, 0, seed)["out"]
    for tiling in range(1, len(PLANS[target.arch].tilings(layer_config(case).kernels))):
        assert torch.equal(run(target, inputs, tiling, seed)["out"], first), f"tiling {tiling}"
    assert torch.equal(run(target, inputs.first(3), 0, seed)["out"], first[:3])


@pytest.mark.slow
def test_warps_of_the_selection_take_several_tokens(target, seed) -> None:
    """Beside a product that has work for all SMs, with the bits of a warp for each token."""
    if target.arch != "sm_90a":
        pytest.skip("Blackwell's selection is a launch of its own")
    inputs = LayerInputs.make(replace(SMALL, tokens=70, live=68), seed)
    found = run(target, inputs, 2, seed, None)
    assert_layer_close(found, inputs)
    kernels, device = OpKernels(MOE, target).compile(inputs.config), Planned(target.arch, 132)
    call = lambda: inputs.call_tiled(2, device).to(target.device)
    spread = run_all(target, kernels, call, seed, target.schedules[:1])
    assert torch.equal(spread["out"], found["out"])


@pytest.mark.slow
@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
@pytest.mark.parametrize(
    ("tokens", "tiling"),
    [(1, 0), (8, 1), (13, 2), (16, 2)],
    ids=["a launch each", "both products in one", "two tiles of tokens", "all of two tiles"],
)
def test_router_beside_the_first_product_has_the_same_bits(
    target, tokens, tiling, is_hashed, seed
) -> None:
    """Units of the gate leave a CTA half empty (5 slices); padding is NaN."""
    if target.arch != "sm_90a":
        pytest.skip("Blackwell's kernels have no such launch")
    case = replace(SMALL, tokens=tokens, hidden=2560, live=max(1, tokens - 2))
    inputs = LayerInputs.make(case, seed, is_hashed=is_hashed)
    kernels = OpKernels(MOE, target).compile(inputs.config)

    def found(inputs: LayerInputs, schedules: int | None, sms: int = 132) -> Outcome:
        device = Planned(target.arch, sms)
        call = lambda: inputs.call_tiled(tiling, device).to(target.device)
        return run_all(target, kernels, call, seed, target.schedules[:schedules])

    # Where there are few SMs, gate and selection are launches of their own.
    plain = found(inputs, 1, sms=3)
    assert_layer_close(plain, inputs)
    for has_codes in (True, False):
        beside = found(replace(inputs, has_codes=has_codes), None)
        assert torch.equal(beside["out"], plain["out"]), has_codes
        assert not beside.scratch["workspace"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "tiling", "is_hashed"),
    [(19, 2, True), (37, 3, False), (70, 2, False)],
    ids=["few tiles", "codes of h", "turns"],
)
def test_router_within_the_first_product_has_the_same_bits(
    target, tokens, tiling, is_hashed, seed
) -> None:
    """Five units of the gate on five SMs, and turns of them on two; padding is NaN, and a table
    lists experts twice."""
    if target.arch != "sm_90a":
        pytest.skip("Blackwell's kernels have no such launch")
    case = replace(SMALL, tokens=tokens, hidden=2560, live=tokens - 2)
    inputs = LayerInputs.make(case, seed, is_hashed=is_hashed)
    kernels = OpKernels(MOE, target).compile(inputs.config)

    def found(inputs: LayerInputs, schedules: int | None, sms: int) -> Outcome:
        device = Planned(target.arch, sms)
        call = lambda: inputs.call_tiled(tiling, device).to(target.device)
        return run_all(target, kernels, call, seed, target.schedules[:schedules])

    # Without codes of the tokens gate and selection are launches of their own.
    plain = found(inputs, 1, SM_90A.num_sms)
    assert_layer_close(plain, inputs)
    if is_hashed:
        # Beyond the oracle, which adds an expert's rows to a token once.
        inputs.table[::3, 1] = inputs.table[::3, 0]
        plain = found(inputs, 1, SM_90A.num_sms)
    given = replace(inputs, has_codes=True)
    for sms in (5, 2):
        within = found(given, None, sms)
        assert torch.equal(within["out"], plain["out"]), sms
        assert not within.scratch["workspace"].any()
        if within.report is not None:
            assert len(within.report.launches) == len(plain.report.launches) - 1


@pytest.mark.slow
def test_the_last_cta_chooses_for_those_that_do_not_wait(seed, monkeypatch) -> None:
    """Where no other CTA runs beside it a CTA leaves its tokens; then all of the router runs, under
    one schedule or another, on few SMs or many."""
    experts, within = (
        importlib.import_module(f"dsv4.kernels.moe.sm90.{name}")
        for name in ("experts", "router_within_product")
    )
    monkeypatch.setattr(experts, "tilings", lambda config: plan.tilings(config)[2:3])
    monkeypatch.setattr(within, "MAX_POLLS", 1)
    target = Simulator("sm_90a", has_lines=True)
    inputs = LayerInputs.make(replace(SMALL, tokens=37, hidden=1024, live=35), seed)
    given = replace(inputs, has_codes=True)
    kernels = OpKernels(MOE, target).compile(inputs.config)

    def make(sms: int) -> Call:
        call = given.call_tiled(2, Planned("sm_90a", sms))
        # The tiling is the only one that is compiled.
        call.options.update(tiling=0)
        return call

    for sms in (4, 1):
        outcome = run_all(target, kernels, partial(make, sms), seed, target.schedules)
        assert_layer_close(outcome, given)
        assert not outcome.scratch["workspace"].any()
    # Coverage adds up over the launches of a compiled function.
    (coverage,) = (one for one in outcome.report.coverage if "RouterWithinProduct" in one.kernel)
    own = re.compile(r"\(\S*router_within_product\.py")
    assert not [block for block in coverage.missed if own.search(str(block))]


@pytest.mark.slow
def test_the_gate_in_rounds_has_the_same_bits(seed, monkeypatch) -> None:
    """As where the product leaves few SMs: units one behind the other in a CTA, the last of which
    does not exist (5 slices by two units, in three rounds)."""
    router, experts = (
        importlib.import_module(f"dsv4.kernels.moe.sm90.{name}")
        for name in ("router_beside_product", "experts")
    )
    # The first tiling alone: others take as long to compile.
    monkeypatch.setattr(experts, "tilings", lambda config: plan.tilings(config)[:1])
    inputs = LayerInputs.make(replace(SMALL, tokens=8, hidden=2560, live=6), seed)
    found = []
    for sms in (SM_90A.num_sms, SMALL.inner // PANEL_ROWS + 1):
        monkeypatch.setattr(router, "SM_90A", replace(SM_90A, num_sms=sms))
        target = Simulator("sm_90a")
        for has_codes in (True, False):
            given = replace(inputs, has_codes=has_codes)
            make = partial(given.call_tiled, 0, Planned("sm_90a", sms))
            kernels = OpKernels(MOE, target).compile(inputs.config)
            found.append(run_all(target, kernels, make, seed, target.schedules))
    first, *others = found
    assert_layer_close(first, inputs)
    grids = [outcome.report.launches[0].grid[0] for outcome in found]
    assert grids == [3 + 4, 3 + 4, 1 + 4, 1 + 4]
    assert all(torch.equal(other["out"], first["out"]) for other in others)


@pytest.mark.slow
def test_eight_tokens_find_room_where_sixteen_do_not(seed, monkeypatch) -> None:
    """Beside the product's four CTAs there are SMs for one set of three CTAs of the gate."""
    experts = importlib.import_module("dsv4.kernels.moe.sm90.experts")
    monkeypatch.setattr(experts, "tilings", lambda config: plan.tilings(config)[:1])
    target, launches = Simulator("sm_90a"), []
    for tokens in (8, 13):
        inputs = LayerInputs.make(replace(SMALL, tokens=tokens, hidden=2560, live=tokens), seed)
        given = replace(inputs, has_codes=True)
        make = partial(given.call_tiled, 0, Planned("sm_90a", 8))
        kernels = OpKernels(MOE, target).compile(inputs.config)
        outcome = run_all(target, kernels, make, seed, target.schedules[:1])
        assert_layer_close(outcome, given)
        launches.append(len(outcome.report.launches))
    assert launches == [4, 5]


def test_sections_of_the_scratch_do_not_overlap() -> None:
    config = MoeConfig(4096, 2048, 256, 6, form="packed")
    for tokens in (1, 7, 512, 513, 8192):
        starts = list(sections(config, tokens, 8 if tokens <= 512 else 1).values())
        assert starts == sorted(starts)
        assert all(start % 64 == 0 for start in starts)
        assert starts[-1] == scratch_bytes(config, tokens)
    # What a launch of 8,192 tokens needs is what it moves: rows of results, above all.
    assert scratch_bytes(config, 8192) < 1.4 * 8192 * 7 * 4096 * 2 + 8192 * 7 * 2048 * 2
