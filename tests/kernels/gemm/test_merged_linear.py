"""The kernels of `merged_linear`: in the simulator, of both architectures, with races and
schedules, and on a Hopper GPU.

Every tiling gives the same bits, close to the reference; FP8 weights give those of `fp8_linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.ops.merged_linear import MERGED_LINEAR, PLANS
from dsv4.testing.harness import Device, Outcome, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.merged_linear import Case, Inputs, assert_merged_close
from tests.kernels.gemm.fp8_kernels import some_tilings

pytestmark = pytest.mark.stage("projections")

FEW_SMS = 4  # two clusters or fewer of each kind, which have several tiles: rings wrap
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]
# Ragged rows, both dtypes of outputs in each kind.
WEIGHTS = (
    "136 float8_e8m0fnu bfloat16, 8 float8_e8m0fnu float32, 72 bfloat16 float32, "
    "64 bfloat16 bfloat16"
)


@pytest.fixture(
    scope="module",
    params=[
        # Tilings of up to 64 tokens; all of them in the slow ones, and of FP8 linears in theirs.
        "few of sm_90a",
        pytest.param("sm_90a", marks=pytest.mark.slow),
        pytest.param("sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", marks=HOPPER),
    ],
)
def kernels(request: pytest.FixtureRequest) -> Iterator[OpKernels]:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    if request.param.startswith("few"):
        plan, few = PLANS["sm_90a"], slice(3)
        every = plan.tilings
        with (
            some_tilings(MERGED_LINEAR, few, arch="sm_90a") as some,
            mock.patch.object(plan, "tilings", lambda config: every(config)[few]),
        ):
            yield some
    else:
        target = Device() if request.param == "cuda" else simulator(request.param)
        yield OpKernels(MERGED_LINEAR, target)


def tilings(kernels: OpKernels, config: MergedLinearConfig) -> tuple:
    return PLANS[kernels.target.arch].tilings(config)


def choose(kernels: OpKernels, config: MergedLinearConfig, tokens: int) -> int:
    return PLANS[kernels.target.arch].choose(config, tokens, FEW_SMS)


def run(
    kernels: OpKernels, inputs: Inputs, tiling: int, seed: int = 0, schedules: int | None = 1,
    races: bool = True,
) -> Outcome:  # fmt: skip
    """Run one tiling in the first few schedules, all for None."""
    return kernels.run(inputs, seed, schedules, races=races, tiling=tiling, num_sms=FEW_SMS)


@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        (Case(21, 512, WEIGHTS), 1),
        pytest.param(Case(65, 512, WEIGHTS), 1, marks=pytest.mark.slow),
        pytest.param(Case(67, 512, WEIGHTS), None, marks=pytest.mark.slow),
        pytest.param(Case(67, 1024, WEIGHTS, is_strided=True), None, marks=pytest.mark.slow),
        pytest.param(Case(20, 2048, WEIGHTS), None, marks=pytest.mark.slow),
        # Two tiles of the most tokens; a kind that has one weight; an odd number of row tiles.
        pytest.param(
            Case(150, 512, "300 float32 float32, 520 bfloat16 float32"),
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(150, 1024, "200 float8_e8m0fnu bfloat16, 328 float8_e8m0fnu bfloat16"),
            None,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_every_tiling_gives_the_same_bits(kernels, case, schedules, seed) -> None:
    inputs = Inputs.make(case, seed)
    every = tilings(kernels, inputs.config)
    outcomes = [run(kernels, inputs, i, seed, schedules) for i in range(len(every))]
    assert_merged_close(outcomes[0], inputs)
    for tiling, outcome in zip(every, outcomes):
        outcomes[0].assert_same_bits(outcome, str(tiling))
    if outcomes[0].report is not None and case.tokens > 64:  # two tiles of many
        # The first tile lacks tokens; of the widest, the second one does.
        for tokens in (5, 33, 70, 130):
            short = Inputs.make(replace(case, tokens=tokens), seed)
            outcomes += [run(kernels, short, i, seed) for i in range(len(every))]
        missed = missed_synchronisation(outcome.report for outcome in outcomes)
        assert not missed, "barriers and fences that no tiling reached"


def test_a_tiling_of_blackwell(seed) -> None:
    """The cheapest one to compile; the others are slow."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(Case(35, 512, WEIGHTS, has_codes=True), seed)
    with some_tilings(MERGED_LINEAR, slice(1)) as kernels:
        together = run(kernels, inputs, 0, seed)
        alone = run(kernels, inputs.first(9), 0, seed)
    assert_merged_close(together, inputs)
    for name in inputs.outputs:
        assert torch.equal(alone[name], together[name][:9]), name


@pytest.mark.slow
def test_codes_give_the_bits_of_what_they_were_rounded_from(kernels, seed) -> None:
    inputs = Inputs.make(Case(67, 512, WEIGHTS, has_codes=True), seed)
    here = run(kernels, Inputs.make(Case(67, 512, WEIGHTS), seed), 0, seed)
    for tiling in range(len(tilings(kernels, inputs.config))):
        run(kernels, inputs, tiling, seed, None).assert_same_bits(here, f"codes, tiling {tiling}")


@pytest.mark.slow
def test_fp8_weights_give_the_bits_of_fp8_linear(kernels, seed) -> None:
    inputs = Inputs.make(Case(21, 512, WEIGHTS), seed)
    merged = run(kernels, inputs, 0, seed)
    alone = OpKernels(FP8_LINEAR, kernels.target)
    for i, part in enumerate(inputs.linears):
        found = alone.run(part, seed, 1, tiling=0, num_sms=FEW_SMS)["out"]
        assert torch.equal(found, merged[f"out_{i}"])


def test_a_token_has_the_same_bits_among_any_number(kernels, seed) -> None:
    """Of the tilings that are checked for races above."""
    inputs = Inputs.make(Case(67, 512, WEIGHTS), seed)
    together = run(kernels, inputs, choose(kernels, inputs.config, 67), seed, races=False)
    assert_merged_close(together, inputs)
    for tokens in (8, 9, 17):
        part = inputs.first(tokens)
        found = run(kernels, part, choose(kernels, inputs.config, tokens), seed, races=False)
        for name in inputs.outputs:
            assert torch.equal(found[name], together[name][:tokens]), f"{name}, T = {tokens}"


def test_rows_that_are_not_finite_touch_no_other(kernels, seed) -> None:
    inputs = Inputs.make(Case(15, 512, WEIGHTS, has_special_rows=True), seed)
    found = run(kernels, inputs, 0, seed)
    ordinary = replace(inputs, x=inputs.x[4::5].clone(), case=replace(inputs.case, tokens=3))
    alone = run(kernels, ordinary, 0, seed)
    for name in inputs.outputs:
        assert found[name][0::5].isnan().all()
        assert (found[name][2::5] == 0).all()
        assert torch.equal(alone[name], found[name][4::5])


def test_without_scratch_many_tokens_follow_each_other(kernels, seed) -> None:
    inputs = Inputs.make(Case(21, 512, WEIGHTS), seed)
    right = run(kernels, inputs, 0, seed)
    for tiling in range(1, len(tilings(kernels, inputs.config))):
        found = run(kernels, replace(inputs, has_scratch=False), tiling, seed)
        found.assert_same_bits(right, "no scratch")


@pytest.mark.slow  # that of FP8 linears is not
def test_nothing_is_written_beside_the_outputs(kernels, seed) -> None:
    inputs = Inputs.make(Case(9, 512, WEIGHTS, is_strided=True), seed)
    compiled = kernels.compile(inputs.config)
    for tiling in range(len(tilings(kernels, inputs.config))):
        call = kernels.call(inputs, tiling=tiling, num_sms=FEW_SMS)
        frames = []
        for y in call.outputs.values():
            frame = y.as_strided((y.shape[0] - 1, y.stride(0)), y.stride())[:, y.shape[1] :]
            frames.append(frame.fill_(7))
        kernels.target.run(compiled, call)
        assert all((frame == 7).all() for frame in frames)
