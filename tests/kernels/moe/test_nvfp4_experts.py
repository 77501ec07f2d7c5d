"""Experts in NVFP4 on Blackwell, activations too, as whole layers: in the simulator, with races and
schedules.

Both tilings give the same bits; each launch is compared with exact sums of what it had before it,
and codes of the tokens with those of torch.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from dsv4.kernels.moe import scratch
from dsv4.kernels.moe.sm100 import plan
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device as Planned
from dsv4.testing import moe_layer
from dsv4.testing.harness import (
    Outcome,
    Simulator,
    assert_clean,
    missed_synchronisation,
    run_all,
    simulator,
)
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close

pytestmark = [pytest.mark.stage("moe"), pytest.mark.slow]

FEW_SMS = 2  # a CTA has several tiles, its ring wraps
SMALL = {"experts": 32, "top_k": 2, "expert_dtype": "nvfp4", "is_tiled": True}
TILINGS = 2


@pytest.fixture(scope="module")
def target() -> Simulator:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return simulator("sm_100a")


def run(
    target: Simulator, inputs: LayerInputs, tiling: int, seed: int, schedules: int | None = 1
) -> Outcome:
    return run_all(
        target,
        OpKernels(MOE, target).compile(inputs.config),
        lambda: inputs.call_tiled(tiling, Planned(target.arch, FEW_SMS)),
        seed,
        target.schedules[:schedules],
    )


@pytest.mark.parametrize(
    "case",
    [
        # Experts without a token, ragged tiles, several tiles of one expert, padding; K of three
        # k blocks.
        Case(19, 512, 384, **SMALL, one_expert=True, live=17),
        # More tokens than a tile of either kind has.
        Case(70, 512, 128, **SMALL, one_expert=True, out_dtype="float32"),
    ],
    ids=str,
)
def test_every_tiling_in_every_schedule(target, case, seed) -> None:
    inputs = LayerInputs.make(case, seed)
    first = run(target, inputs, 0, seed, schedules=None)
    assert_layer_close(first, inputs)
    for tiling in range(1, TILINGS):
        outcome = run(target, inputs, tiling, seed, schedules=None)
        assert_layer_close(outcome, inputs)
        assert torch.equal(outcome["out"], first["out"])


def test_a_table_chooses(target, seed) -> None:
    case = Case(5, 512, 384, **SMALL, has_missing=True, live=4)
    inputs = LayerInputs.make(case, seed, is_hashed=True)
    assert_layer_close(run(target, inputs, 0, seed), inputs)


def test_a_token_has_the_same_bits_among_any_number(target, seed) -> None:
    inputs = LayerInputs.make(Case(19, 512, 384, **SMALL, one_expert=True), seed)
    together = run(target, inputs, 1, seed)["out"]
    for tokens in (1, 2, 9):
        tiling = plan.choose(inputs.config.kernels, tokens, inputs.case.experts)
        found = run(target, inputs.first(tokens), tiling, seed)["out"]
        assert torch.equal(found, together[:tokens]), f"T = {tokens}"


def test_rows_that_are_not_finite_touch_no_other(target, seed) -> None:
    case = Case(10, 512, 384, **SMALL, has_special_rows=True)
    inputs = LayerInputs.make(case, seed)
    outcome = run(target, inputs, 0, seed)
    assert_layer_close(outcome, inputs)
    x = inputs.inputs.x[4::5]
    few = replace(inputs.inputs, case=replace(case, tokens=2), x=x)
    ordinary = replace(inputs, inputs=few, input_ids=inputs.input_ids[4::5].contiguous())
    assert torch.equal(run(target, ordinary, 0, seed)["out"], outcome["out"][4::5])


def test_without_a_live_token_the_result_is_zero(target, seed) -> None:
    inputs = LayerInputs.make(Case(3, 512, 384, **SMALL, live=0), seed)
    assert (run(target, inputs, 0, seed)["out"] == 0).all()


def test_many_tokens_are_packed_by_their_own_gate(target, seed, monkeypatch) -> None:
    """The gate of many tokens, with few of them."""
    inputs = LayerInputs.make(Case(70, 1024, 128, **SMALL), seed)
    few = run(target, inputs, 1, seed)
    for module in (import_module(MOE.__module__), scratch, moe_layer):
        monkeypatch.setattr(module, "gate_tiling", lambda config, tokens: (1, 0))
    many = run(target, inputs, 1, seed)
    assert_layer_close(many, inputs)
    assert torch.equal(many["out"], few["out"])


def test_every_barrier_and_fence_is_reached(target, seed) -> None:
    inputs = LayerInputs.make(Case(70, 512, 384, **SMALL, one_expert=True), seed)
    compiled = OpKernels(MOE, target).compile(inputs.config)
    # The first tile of a CTA is one of the shared expert, whose weights are known, or are not, or
    # one of a routed expert; a CTA takes all tiles of one token.
    launches = ((70, 2), (70, 8), (3, 16), (1, 1))
    outcomes = [
        target.run(compiled, inputs.first(tokens).call_tiled(i, Planned("sm_100a", sms)))
        for i in range(TILINGS)
        for tokens, sms in launches
    ]
    for outcome in outcomes:
        assert_clean(outcome.report)
    missed = missed_synchronisation(outcome.report for outcome in outcomes)
    # The router's tests are about its kernels.
    assert not [name for name in missed if "GroupedProduct" in name]
