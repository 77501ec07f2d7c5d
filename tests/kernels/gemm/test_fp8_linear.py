"""The kernels of `fp8_linear`: in the simulator, with races and schedules, and on a Hopper GPU.

Every tiling gives the same bits, close to the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.plan import choose, tilings
from dsv4.testing.fp8_linear import Case, Inputs, assert_linear_close
from dsv4.testing.harness import (
    Device,
    Outcome,
    Simulator,
    Target,
    assert_clean,
    missed_synchronisation,
    run_all,
)

pytestmark = pytest.mark.stage("projections")

FEW_SMS = 1  # a cluster has several tiles, its ring wraps
ANY_ROWS = 32768  # a configuration of many rows: every tile has one CTA
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(scope="module", params=["sm_90a", pytest.param("cuda", marks=HOPPER)])
def target(request: pytest.FixtureRequest) -> Target:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else Simulator(request.param)


def build(config: Fp8LinearConfig, options: str):
    from dsv4.kernels.gemm.sm90.fp8_linear import build

    return build(config, options)


def run(
    target: Target,
    inputs: Inputs,
    tiling: int,
    seed: int = 0,
    num_sms: int = FEW_SMS,
    schedules: int | None = 1,
    config: Fp8LinearConfig | None = None,
    has_scratch: bool = True,
) -> Outcome:
    """Run one tiling in the first few schedules, all for None."""
    return run_all(
        target,
        target.compile(build, inputs.case.config if config is None else config),
        lambda: inputs.call(tiling, num_sms, has_scratch).to(target.device),
        seed,
        target.schedules[:schedules],
    )


def check_every_tiling(
    target: Target, inputs: Inputs, seed: int, config: Fp8LinearConfig | None = None, **options
) -> Outcome:
    """Compare one tiling with the reference, and all others with it bit for bit."""
    config = inputs.case.config if config is None else config
    outcomes = [
        run(target, inputs, tiling, seed, config=config, **options)
        for tiling in range(len(tilings(config)))
    ]
    assert_linear_close(outcomes[0]["y"], inputs)
    for tiling, outcome in zip(tilings(config), outcomes):
        outcomes[0].assert_same_bits(outcome, str(tiling))
    return outcomes[0]


@pytest.mark.parametrize(
    "case",
    [
        # Ragged tiles of tokens and rows, more k blocks than any ring has stages.
        Case(21, 1024, 200),
        pytest.param(Case(67, 512, 136, is_strided=True), marks=pytest.mark.slow),
        pytest.param(Case(20, 2048, 136), marks=pytest.mark.slow),
        pytest.param(Case(70, 4096, 328), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_tiling_in_every_schedule(target, case, seed) -> None:
    check_every_tiling(target, Inputs.make(case, seed), seed, schedules=None)


@pytest.mark.parametrize(
    "case",
    [
        Case(9, 512, 136, scale_dtype="float32", out_dtype="float32"),
        Case(18, 1024, 72, x_dtype="float8_e4m3fn"),
    ],
    ids=str,
)
def test_dtypes(target, case, seed) -> None:
    inputs = Inputs.make(case, seed)
    found = check_every_tiling(target, inputs, seed)
    if case.x_dtype == "float8_e4m3fn":
        wide = Inputs.make(replace(case, x_dtype="bfloat16"), seed)
        run(target, wide, 0, seed).assert_same_bits(found, "codes against bf16")


def test_one_cta_for_all_slices(target, seed) -> None:
    """Layers with many rows: sums of all slices on one stack."""
    inputs = Inputs.make(Case(19, 2048, 72), seed)
    alone = check_every_tiling(
        target, inputs, seed, replace(inputs.case.config, out_features=ANY_ROWS)
    )
    run(target, inputs, 1, seed).assert_same_bits(alone, "clusters against one CTA a tile")


def test_a_token_has_the_same_bits_among_any_number(target, seed) -> None:
    inputs = Inputs.make(Case(200, 512, 136), seed)
    config = inputs.case.config
    all_tokens = run(target, inputs, choose(config, 200, FEW_SMS), seed)["y"]
    assert_linear_close(all_tokens, inputs)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 64, 65):
        found = run(target, inputs.first(tokens), choose(config, tokens, FEW_SMS), seed)["y"]
        assert torch.equal(found, all_tokens[:tokens]), f"T = {tokens}"


def test_rows_that_are_not_finite_touch_no_other(target, seed) -> None:
    case = Case(15, 512, 136, has_special_rows=True)
    inputs = Inputs.make(case, seed)
    found = check_every_tiling(target, inputs, seed)["y"]
    assert found[0::5].isnan().all()
    assert (found[2::5] == 0).all()
    part = inputs.x[4::5].clone()
    alone = Inputs(
        replace(case, tokens=len(part)), part, inputs.weight, inputs.scale, inputs.x_scale, part
    )
    assert torch.equal(run(target, alone, 0, seed)["y"], found[4::5])


def test_without_scratch_many_tokens_follow_each_other(target, seed) -> None:
    inputs = Inputs.make(Case(21, 512, 136), seed)
    right = run(target, inputs, 0, seed)
    for tiling in range(1, len(tilings(inputs.case.config))):
        run(target, inputs, tiling, seed, has_scratch=False).assert_same_bits(right, "no scratch")


def test_nothing_is_written_beside_the_output(target, seed) -> None:
    inputs = Inputs.make(Case(9, 512, 136, is_strided=True), seed)
    compiled = target.compile(build, inputs.case.config)
    for tiling in range(len(tilings(inputs.case.config))):
        call = inputs.call(tiling, FEW_SMS).to(target.device)
        y = call.outputs["y"]
        frame = y.as_strided((y.shape[0] - 1, y.stride(0)), y.stride())[:, y.shape[1] :]
        frame.fill_(7)
        target.run(compiled, call)
        assert (frame == 7).all()


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Simulator("sm_90a")


@pytest.mark.parametrize("config_rows", [136, ANY_ROWS])
def test_every_barrier_and_fence_is_reached(simulator, config_rows, seed) -> None:
    inputs = Inputs.make(Case(65, 1024, 136), seed)
    config = replace(inputs.case.config, out_features=config_rows)
    compiled = simulator.compile(build, config)
    outcomes = [
        simulator.run(compiled, inputs.call(tiling, FEW_SMS))
        for tiling in range(len(tilings(config)))
    ]
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)
