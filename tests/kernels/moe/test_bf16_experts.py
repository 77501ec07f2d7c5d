"""Experts that are multiplied in bf16, NVFP4 and bf16 ones, as whole layers: in the simulator, with
races and schedules, and on a Hopper GPU.

Every tiling gives the same bits; each launch is compared with exact sums of what it had before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.kernels.moe import plan
from dsv4.kernels.moe.config import BF16_DTYPES
from dsv4.kernels.moe.layer_config import KERNEL_DTYPES
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device as Planned
from dsv4.testing.harness import (
    Call,
    Device,
    Outcome,
    Simulator,
    Target,
    assert_clean,
    missed_synchronisation,
    run_all,
)
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close

pytestmark = pytest.mark.stage("moe")

HOPPER = [pytest.mark.gpu, pytest.mark.sm90]
FEW_SMS = 2  # a CTA has several tiles, its ring wraps
# K of three k blocks, which fill no whole number of stages, and of four.
SMALL = {"hidden": 512, "inner": 384, "experts": 32, "top_k": 2}
TILINGS = 3
CASES = [
    # Experts without a token, ragged tiles, several tiles of one expert, padding.
    Case(11, **SMALL, expert_dtype="nvfp4", one_expert=True, live=9),
    Case(11, **SMALL, expert_dtype="bfloat16", one_expert=True, live=9),
    Case(3, **SMALL, expert_dtype="bfloat16", shared_dtype="bfloat16", out_dtype="float32"),
]


@pytest.fixture(scope="module", params=["sm_90a", pytest.param("cuda", marks=HOPPER)])
def target(request: pytest.FixtureRequest) -> Target:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else Simulator(request.param)


def tilings(case: Case) -> tuple[plan.Tiling, ...]:
    return plan.tilings(case.config)


def run(
    target: Target, inputs: LayerInputs, tiling: int, seed: int, schedules: int | None = 1
) -> Outcome:
    device = Planned(target.arch, FEW_SMS)
    return run_all(
        target,
        OpKernels(MOE, target).compile(inputs.config),
        lambda: inputs.call_tiled(tiling, device).to(target.device),
        seed,
        target.schedules[:schedules],
    )


@pytest.fixture
def first_tiling_alone(monkeypatch) -> None:
    """Of the kernels that are compiled: others take as long."""
    from dsv4.kernels.moe.sm90 import bf16_experts

    monkeypatch.setattr(bf16_experts, "tilings", lambda config: plan.tilings(config)[:1])


@pytest.mark.slow
def test_few_tokens(first_tiling_alone, seed) -> None:
    """The cheapest of this module."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    case = Case(9, 512, 128, 32, 2, expert_dtype="nvfp4", one_expert=True, live=8)
    inputs = LayerInputs.make(case, seed)
    assert_layer_close(run(Simulator("sm_90a"), inputs, 0, seed), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("tiling", range(TILINGS))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tiling_in_every_schedule(target, case, tiling, seed) -> None:
    inputs = LayerInputs.make(case, seed)
    outcome = run(target, inputs, tiling, seed, schedules=None)
    assert_layer_close(outcome, inputs)
    if tiling > 0:
        assert torch.equal(run(target, inputs, 0, seed)["out"], outcome["out"])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_router_beside_the_first_product_has_the_same_bits(target, tokens, seed) -> None:
    """Of a shared expert in FP8, which rounds tokens by itself; codes that are given are not read.
    Padding is NaN."""
    case = Case(tokens, **SMALL, expert_dtype="nvfp4", live=max(1, tokens - 2))
    inputs = LayerInputs.make(case, seed)
    kernels, tiling = OpKernels(MOE, target).compile(inputs.config), int(tokens > 1)
    plain = run(target, inputs, tiling, seed)
    for has_codes in (False, True):
        given = replace(inputs, has_codes=has_codes)
        make = partial(_on_all_sms, target, given, tiling)
        found = run_all(target, kernels, make, seed, target.schedules)
        assert_layer_close(found, inputs)
        assert torch.equal(found["out"], plain["out"]), has_codes
        assert not found.scratch["workspace"].any()
        if found.report is not None:
            names = [launch.kernel for launch in found.report.launches]
            assert any("RouterBesideProduct" in name for name in names), names


def _on_all_sms(target: Target, inputs: LayerInputs, tiling: int) -> Call:
    return inputs.call_tiled(tiling, Planned(target.arch, 132)).to(target.device)


@pytest.mark.slow
def test_a_token_has_the_same_bits_among_any_number(target, seed) -> None:
    inputs = LayerInputs.make(Case(19, **SMALL, expert_dtype="nvfp4", one_expert=True), seed)
    together = run(target, inputs, 2, seed)["out"]
    for tokens in (1, 2, 9):
        tiling = plan.choose(inputs.config.kernels, tokens, inputs.case.experts)
        found = run(target, inputs.first(tokens), tiling, seed)["out"]
        assert torch.equal(found, together[:tokens]), f"T = {tokens}"


@pytest.mark.slow
def test_rows_that_are_not_finite_touch_no_other(target, seed) -> None:
    case = Case(10, **SMALL, expert_dtype="nvfp4", has_special_rows=True)
    inputs = LayerInputs.make(case, seed)
    outcome = run(target, inputs, 0, seed)
    x = inputs.inputs.x[4::5]
    few = replace(inputs.inputs, case=replace(case, tokens=2), x=x)
    ordinary = replace(inputs, inputs=few, input_ids=inputs.input_ids[4::5].contiguous())
    assert torch.equal(run(target, ordinary, 0, seed)["out"], outcome["out"][4::5])


@pytest.mark.slow
@pytest.mark.parametrize("expert_dtype", ["nvfp4", "bfloat16"])
def test_every_barrier_and_fence_is_reached(expert_dtype, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    simulator = Simulator("sm_90a")
    inputs = LayerInputs.make(Case(70, **SMALL, expert_dtype=expert_dtype, one_expert=True), seed)
    compiled = OpKernels(MOE, simulator).compile(inputs.config)
    device = Planned("sm_90a", FEW_SMS)
    outcomes = [
        simulator.run(compiled, inputs.first(tokens).call_tiled(i, device))
        for i in range(len(tilings(inputs.case)))
        for tokens in (5, 70)
    ]
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)


@pytest.mark.parametrize(
    ("expert_dtype", "shared_dtype"),
    [pair for pair in KERNEL_DTYPES if pair[0] in BF16_DTYPES],
)
def test_budgets_of_layers_of_the_models(expert_dtype, shared_dtype) -> None:
    """Planning checks them: shared memory, stages, tiles."""
    for hidden, inner in ((4096, 2048), (7168, 3072), (512, 128)):
        dtypes = {"expert_dtype": expert_dtype, "shared_dtype": shared_dtype}
        case = Case(1, hidden, inner, 32, 6, **dtypes)
        for tiling in tilings(case):
            for is_shared in (True, False):
                plan.ProductPlan.gate_and_up(case.config, tiling, is_shared, 1)
            down = plan.ProductPlan.down(case.config, tiling, 1)
            assert down.smem.total_bytes <= down.capacity
            assert all(kind.is_bf16 for kind in down.routed)
        assert len(tilings(case)) == TILINGS
        numbers = [
            plan.choose(case.config, tokens, case.experts) for tokens in (1, 2, 128, 257, 32768)
        ]
        assert numbers == [0, 1, 1, 2, 2]
