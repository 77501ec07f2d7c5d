"""The router's kernels: in the simulator of both architectures, with races and schedules, and on a
GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from dsv4.kernels.moe.routing import RoutingConfig
from dsv4.ops.moe.torch_path import route
from dsv4.testing.harness import (
    Outcome,
    Target,
    missed_synchronisation,
    run_all,
    simulator,
)
from dsv4.testing.moe_router import RouterCase, RouterInputs, assert_routed

pytestmark = pytest.mark.stage("router")

RESULTS = ("codes", "scales", "ids", "weights")


def build(config: RoutingConfig, options: str):
    from dsv4.kernels.moe.router import build

    return build(config, options)


def build_many(config: RoutingConfig, options: str):
    from dsv4.kernels.moe.router import build_many

    return build_many(config, options)


def build_few_runs(config: RoutingConfig, options: str):
    """As `build_many`, with three tokens of a run for each warp."""
    from dsv4.kernels.moe import select_many

    with patch.object(select_many, "run_rounds", lambda *_: 3):
        return build_many(config, options)


def run(
    target: Target, inputs: RouterInputs, seed: int, schedules: int | None = 1, tiling=None,
    build=build,
):  # fmt: skip
    compiled = target.compile(build, inputs.case.config)
    return run_all(
        target,
        compiled,
        lambda: inputs.call(tiling).to(target.device),
        seed,
        target.schedules[:schedules],
    )


@pytest.mark.parametrize(
    "case",
    [
        RouterCase(13, live=11),
        RouterCase(18, is_hashed=True, live=17),
        pytest.param(RouterCase(1), marks=pytest.mark.slow),
        pytest.param(RouterCase(3, 4096, 256, 6), marks=pytest.mark.slow),
        pytest.param(RouterCase(9, 7168, 384, 6), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_schedule(target, case, seed) -> None:
    inputs = RouterInputs.make(case, seed)
    assert_routed(run(target, inputs, seed, schedules=None), inputs)


@pytest.mark.parametrize(
    "changes",
    [
        dict(ties=True, live=99),
        dict(one_expert=True, group_tokens=16),
        dict(live=0),
        dict(live=-3),
        pytest.param(dict(experts=160, top_k=7), marks=pytest.mark.slow),
        pytest.param(dict(top_k=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_edges(target, changes, seed) -> None:
    inputs = RouterInputs.make(replace(RouterCase(21), **changes), seed)
    assert_routed(run(target, inputs, seed), inputs)


def same(first: Outcome, other: Outcome, tokens: int, what: str) -> None:
    for name in RESULTS:
        left, right = (o[name][:tokens].view(torch.uint8) for o in (first, other))
        assert torch.equal(left, right), f"{name}: {what}"


def test_a_token_has_the_same_bits_in_any_tiling_and_number(target, seed) -> None:
    inputs = RouterInputs.make(RouterCase(19, 1024), seed)
    alone = run(target, inputs, seed, tiling=(2, 1))
    for tiling in ((1, 1), (1, 2), (2, 4)):
        same(alone, run(target, inputs, seed, tiling=tiling), 19, str(tiling))
    for tokens in (1, 9):
        same(alone, run(target, inputs.first(tokens), seed), tokens, f"T = {tokens}")


def test_scores_that_are_not_numbers_come_last(target, seed) -> None:
    inputs = RouterInputs.make(RouterCase(4), seed)
    inputs.weight[::2, 0] = torch.nan
    inputs.x[3, 1] = torch.nan
    ids = run(target, inputs, seed)["ids"]
    assert (ids[:3] % 2 == 1).all()
    assert (ids[3] == torch.arange(3)).all()


def test_weights_of_scores_that_are_not_finite_are_those_of_torch(target, seed) -> None:
    """Infinite scores, or none but 0: quotients that are no numbers, of that token alone."""
    inputs = RouterInputs.make(RouterCase(4), seed)
    x, weight, case = inputs.x, inputs.weight, inputs.case
    # By the first elements of x: two logits +inf and the others -inf, all -inf, all +inf.
    weight[:, 0], weight[2:, 0], weight[:, 1], weight[:, 2] = 1, -1, -1, 1
    x[:, :3] = 0
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.inf, torch.inf
    outcome = run(target, inputs, seed)
    ids, weights = outcome["ids"].cpu().long(), outcome["weights"].cpu()
    options = {"top_k": case.top_k, "scaling": case.scaling, "bias": inputs.bias.cpu()}
    wanted_ids, wanted = route(x.cpu(), weight.cpu(), **options)
    assert torch.equal(ids[:3], wanted_ids[:3])
    assert torch.equal(weights[:3].isnan(), wanted[:3].isnan())
    assert weights[:3].isnan().sum(1).tolist() == [2, 3, 3]
    assert weights[3].isfinite().all()


@pytest.mark.slow
def test_every_barrier_and_fence_is_reached(seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # More pairs than the warps of the sort hold at once; and tokens that one CTA has all.
    reports = []
    for tokens, tiling in ((1180, (1, 8)), (3, (1, 1))):
        inputs = RouterInputs.make(RouterCase(tokens, top_k=7), seed)
        outcome = run(simulator("sm_90a"), inputs, seed, tiling=tiling)
        assert_routed(outcome, inputs)
        reports.append(outcome.report)
    assert not missed_synchronisation(reports)


@pytest.mark.parametrize(
    "case",
    [
        # Experts past the last one, tiles without tokens, several runs.
        RouterCase(70, live=61),
        # The ring wraps.
        pytest.param(RouterCase(70, 1024, live=61), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_tokens_have_the_bits_of_few(target, case, seed) -> None:
    inputs = RouterInputs.make(case, seed)
    many = run(target, inputs, seed, tiling=(1, 1), build=build_few_runs)
    assert_routed(many, inputs)
    same(run(target, inputs, seed, tiling=(1, 8)), many, 70, "few")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        RouterCase(70, live=67),
        RouterCase(130, one_expert=True, group_tokens=16),
        RouterCase(50, live=0),
        RouterCase(37, is_hashed=True, live=30),
        RouterCase(70, 1536, experts=160, top_k=7),
        RouterCase(33, experts=640, top_k=6),
    ],
    ids=str,
)
def test_many_tokens_in_every_schedule(target, case, seed) -> None:
    inputs = RouterInputs.make(case, seed)
    outcome = run(target, inputs, seed, schedules=None, tiling=(1, 1), build=build_many)
    assert_routed(outcome, inputs)
    same(run(target, inputs, seed, tiling=(1, 8)), outcome, case.tokens, "few")
