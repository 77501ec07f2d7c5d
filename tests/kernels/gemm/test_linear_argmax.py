"""The kernels of `linear_argmax`: in the simulator, of both architectures, with races and
schedules, and on a Hopper GPU.

Every tiling finds the rows of the largest outputs, which have the same bits in all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.ops.linear_argmax import LINEAR_ARGMAX
from dsv4.ops.plain_linear import PLANS
from dsv4.testing.fp8_linear import Case
from dsv4.testing.harness import (
    Device,
    Outcome,
    Simulator,
    assert_clean,
    missed_synchronisation,
    simulator,
)
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.linear_argmax import Inputs, rows_of
from dsv4.testing.plain_linear import assert_plain_close
from tests.kernels.gemm.fp8_kernels import some_tilings

pytestmark = pytest.mark.stage("projections")

FEW_SMS = 2  # clusters have several tiles: rings wrap
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(
    scope="module",
    params=[
        "sm_90a",
        pytest.param("sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", marks=HOPPER),
    ],
)
def kernels(request: pytest.FixtureRequest) -> OpKernels:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    is_device = request.param == "cuda"
    return OpKernels(LINEAR_ARGMAX, Device() if is_device else simulator(request.param))


def check(
    kernels: OpKernels,
    inputs: Inputs,
    seed: int,
    schedules: int | None = 1,
    tilings: slice = slice(None),
) -> list[Outcome]:
    """Compare every tiling's rows with those of the outputs, and the outputs of all tilings."""
    outcomes = []
    for i, tiling in enumerate(PLANS[kernels.target.arch].TILINGS[tilings]):
        options = {"tiling": i, "num_sms": FEW_SMS}
        outcomes.append(kernels.run(inputs, seed, schedules, **options))
        wanted = rows_of(outcomes[0]["out"])
        assert torch.equal(outcomes[-1]["rows"], wanted), str(tiling)
        outcomes[0].assert_same_bits(outcomes[-1], str(tiling))
        alone = kernels.run(replace(inputs, writes=False), seed, **options)
        assert torch.equal(alone["rows"], wanted), f"{tiling}, without y"
    return outcomes


@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        (Case(11, 512, 328, out_dtype="float32"), 1),
        pytest.param(Case(67, 1024, 392, is_strided=True), None, marks=pytest.mark.slow),
        pytest.param(Case(150, 2048, 200, out_dtype="float32"), None, marks=pytest.mark.slow),
        pytest.param(Case(300, 512, 72, out_dtype="float32"), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_tiling_finds_the_best_rows(kernels, case, schedules, seed) -> None:
    inputs = Inputs.make(case, seed)
    outcomes = check(kernels, inputs, seed, schedules)
    assert_plain_close(outcomes[0]["out"], inputs.plain)


def test_a_tiling_of_blackwell(seed) -> None:
    """The cheapest one to compile, which `plain_linear` shares; the others are slow."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs, which = Inputs.make(Case(35, 512, 328, out_dtype="float32"), seed), slice(1)
    with some_tilings(LINEAR_ARGMAX, which, "TILINGS") as kernels:
        outcome, *_ = check(kernels, inputs, seed, tilings=which)
    assert_plain_close(outcome["out"], inputs.plain)


@pytest.mark.slow
def test_values_that_are_not_finite(kernels, seed) -> None:
    """NaN and minus infinity alone are failures; of several infinities the first is the best."""
    inputs = Inputs.make(Case(9, 512, 136, out_dtype="float32"), seed)
    x, weight = inputs.plain.x, inputs.plain.weight
    weight[:, 0] = -1.0
    weight[7::9, 1] = 1.0
    x[:6] = 0
    x[0, 0], x[1, 3], x[2, 0] = torch.inf, torch.nan, -torch.inf
    weight[:, 2] = -0.0
    x[4, 2] = 1.0
    rows = check(kernels, inputs, seed)[0]["rows"]
    assert rows[:6].tolist() == [-1, -1, 0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_barrier_and_fence_is_reached(arch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    kernels = OpKernels(LINEAR_ARGMAX, Simulator(arch))
    # The first tile of 128 tokens lacks some, or the second one.
    outcomes = []
    for tokens in (65, 130):
        inputs = Inputs.make(Case(tokens, 1024, 328, out_dtype="float32"), seed)
        outcomes += check(kernels, inputs, seed)
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)
