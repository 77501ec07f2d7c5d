"""The kernels of `grouped_linear`: in the simulator, of both architectures, with races and
schedules, and on a Hopper GPU.

Every tiling gives the same bits, close to the reference, which does not round x.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.grouped_config import CODES, GroupedLinearConfig
from dsv4.ops.grouped_linear import GROUPED_LINEAR, PLANS
from dsv4.ops.quantize import quantize_e4m3
from dsv4.testing.grouped_linear import Case, Inputs, assert_grouped_close
from dsv4.testing.harness import (
    Device,
    Outcome,
    Simulator,
    assert_clean,
    missed_synchronisation,
    simulator,
)
from dsv4.testing.kernel_call import OpKernels
from tests.kernels.gemm.fp8_kernels import some_tilings

pytestmark = pytest.mark.stage("projections")

FEW_SMS = 2  # clusters have several tiles, of several groups: rings wrap
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
    return OpKernels(GROUPED_LINEAR, Device() if is_device else simulator(request.param))


def tilings(kernels: OpKernels, config: GroupedLinearConfig) -> tuple:
    return PLANS[kernels.target.arch].tilings(config)


def choose(kernels: OpKernels, config: GroupedLinearConfig, tokens: int) -> int:
    return PLANS[kernels.target.arch].choose(config, tokens, FEW_SMS)


def run(
    kernels: OpKernels, inputs: Inputs, tiling: int, seed: int = 0, schedules: int | None = 1
) -> Outcome:
    """Run one tiling in the first few schedules, all for None."""
    return kernels.run(inputs, seed, schedules, tiling=tiling, num_sms=FEW_SMS)


def check_every_tiling(
    kernels: OpKernels, inputs: Inputs, seed: int, schedules: int | None = 1
) -> list[Outcome]:
    """Compare one tiling with the reference, and all others with it bit for bit."""
    every = tilings(kernels, inputs.config)
    outcomes = [run(kernels, inputs, tiling, seed, schedules) for tiling in range(len(every))]
    assert_grouped_close(outcomes[0]["out"], inputs)
    for tiling, outcome in zip(every, outcomes):
        outcomes[0].assert_same_bits(outcome, str(tiling))
    return outcomes


@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        pytest.param(Case(11, 512, 256, 3), 1, marks=pytest.mark.slow),
        pytest.param(Case(67, 512, 256, 3, is_strided=True), None, marks=pytest.mark.slow),
        pytest.param(Case(130, 1024, 256, 2), None, marks=pytest.mark.slow),
        pytest.param(Case(21, 2048, 512, 2), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_tiling_gives_the_same_bits(kernels, case, schedules, seed) -> None:
    check_every_tiling(kernels, Inputs.make(case, seed), seed, schedules)


def test_a_tiling_of_blackwell(seed) -> None:
    """The cheapest one to compile; the others are slow."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(Case(19, 512, 256, 3), seed)
    with some_tilings(GROUPED_LINEAR, slice(1)) as kernels:
        together = run(kernels, inputs, 0, seed)["out"]
        alone = run(kernels, inputs.first(7), 0, seed)["out"]
    assert_grouped_close(together, inputs)
    assert torch.equal(alone, together[:7])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(19, 512, 256, 2, "fp8"),
        Case(10, 512, 256, 2, scale_dtype="float32", out_dtype="float32"),
    ],
    ids=str,
)
def test_options(kernels, case, seed) -> None:
    check_every_tiling(kernels, Inputs.make(case, seed), seed)


@pytest.mark.slow  # a compilation of its own
def test_small_activations_are_not_rounded(kernels, seed) -> None:
    """Values of one group that differ by 2^14 and are far below what FP8 scales are floored at."""
    inputs = Inputs.make(Case(3, 512, 256, 2), seed)
    factors = torch.exp2(-40 - 14 * torch.rand(inputs.x.shape))
    small = (torch.randn(inputs.x.shape) * factors).bfloat16()
    inputs = replace(inputs, x=small)
    assert_grouped_close(run(kernels, inputs, 0, seed)["out"], inputs)


@pytest.mark.slow
def test_a_token_has_the_same_bits_among_any_number(kernels, seed) -> None:
    inputs = Inputs.make(Case(130, 512, 256, 2), seed)
    together = run(kernels, inputs, choose(kernels, inputs.config, 130), seed)["out"]
    assert_grouped_close(together, inputs)
    for tokens in (1, 7, 8, 9, 16, 17, 33, 65):
        found = run(kernels, inputs.first(tokens), choose(kernels, inputs.config, tokens), seed)
        assert torch.equal(found["out"], together[:tokens]), f"T = {tokens}"


@pytest.mark.slow
def test_rows_that_are_not_finite_touch_no_other(kernels, seed) -> None:
    inputs = Inputs.make(Case(15, 512, 256, 2, has_special_rows=True), seed)
    found = check_every_tiling(kernels, inputs, seed)[0]["out"]
    assert found[0::5].isnan().all()
    assert (found[2::5] == 0).all()
    ordinary = replace(inputs, x=inputs.x[4::5].clone(), case=replace(inputs.case, tokens=3))
    assert torch.equal(run(kernels, ordinary, 0, seed)["out"], found[4::5])


@pytest.mark.slow
def test_without_scratch_many_tokens_follow_each_other(kernels, seed) -> None:
    inputs = Inputs.make(Case(21, 512, 256, 2), seed)
    right = run(kernels, inputs, 0, seed)
    for tiling in range(1, len(tilings(kernels, inputs.config))):
        found = run(kernels, replace(inputs, has_scratch=False), tiling, seed)
        found.assert_same_bits(right, "no scratch")


def check_codes(
    kernels: OpKernels, case: Case, seed: int, schedules: int | None = 1
) -> list[Outcome]:
    """Every tiling gives the codes that the same outputs in bf16 are rounded to."""
    inputs, outcomes = Inputs.make(replace(case, out_dtype=CODES), seed), []
    y = run(kernels, inputs.in_bfloat16, 0, seed)["out"]
    codes, scales = quantize_e4m3(y, K_BLOCK)
    for i, tiling in enumerate(tilings(kernels, inputs.config)):
        outcomes.append(run(kernels, inputs, i, seed, schedules))
        for name, wanted in (("out", codes), ("out_scale", scales)):
            bits = outcomes[-1][name].view(torch.uint8)
            assert torch.equal(bits, wanted.view(torch.uint8)), f"{name} of {tiling}"
    return outcomes


@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        (Case(11, 512, 256, 2), 1),
        pytest.param(Case(11, 512, 256, 3), None, marks=pytest.mark.slow),
        pytest.param(Case(67, 512, 256, 3, is_strided=True), None, marks=pytest.mark.slow),
        pytest.param(Case(130, 1024, 256, 2), None, marks=pytest.mark.slow),
        pytest.param(Case(21, 2048, 512, 2), None, marks=pytest.mark.slow),
        pytest.param(Case(70, 2048, 512, 2, "fp8"), None, marks=pytest.mark.slow),
        pytest.param(Case(15, 512, 256, 2, has_special_rows=True), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_become_codes(kernels, case, schedules, seed) -> None:
    check_codes(kernels, case, seed, schedules)


def test_codes_of_consecutive_token_tiles_of_blackwell(seed) -> None:
    """Maxima of a tile of other tokens do not come where those of the tile before are still
    read."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(Case(67, 512, 256, 1, out_dtype=CODES), seed)
    with some_tilings(GROUPED_LINEAR, slice(1)) as kernels:
        run(kernels, inputs, 0, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(19, 512, 256, 3),
        Case(67, 512, 256, 3, is_strided=True),
        Case(130, 1024, 256, 2, out_dtype=CODES),
        Case(15, 512, 256, 2, has_special_rows=True),
        Case(70, 512, 256, 2, "fp8"),
        Case(10, 512, 256, 2, scale_dtype="float32", out_dtype="float32"),
    ],
    ids=str,
)
def test_inputs_may_be_codes(kernels, case, seed) -> None:
    """The bits of bf16 inputs in every tiling, of which there is none that makes codes; rows of
    codes of no token may hold anything."""
    inputs = Inputs.make(case, seed)
    wanted = run(kernels, inputs, len(tilings(kernels, inputs.config)) - 1, seed)
    given = inputs.of_codes
    names = [name for name in ("out", "out_scale") if name in wanted.outputs]
    for i, tiling in enumerate(tilings(kernels, given.config)):
        assert tiling.is_streamed
        found = run(kernels, given, i, seed)
        for name in names:
            bits = [outcome[name].view(torch.uint8) for outcome in (found, wanted)]
            assert torch.equal(*bits), f"{name} of {tiling}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("gives_codes", [False, True])
def test_every_barrier_and_fence_is_reached(arch, gives_codes, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    kernels, outcomes = OpKernels(GROUPED_LINEAR, Simulator(arch)), []
    # The first tile of 64 tokens lacks some, or the second one.
    for tokens in (36, 65):
        case = Case(tokens, 1024, 256, 2)
        if gives_codes:
            outcomes += check_codes(kernels, case, seed)
        else:
            outcomes += check_every_tiling(kernels, Inputs.make(case, seed), seed)
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)
