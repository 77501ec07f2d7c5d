"""The kernel against the torch implementation, byte for byte: in the simulator for both
architectures, with races and schedules, and on a GPU where there is one."""

from __future__ import annotations

import pytest

from dsv4.testing.harness import Device, Simulator, Target, run_all
from dsv4.testing.kv_insert import Case, Inputs, assert_same_pool, frame_of

pytestmark = pytest.mark.stage("rows")

FEW_CTAS = 2  # each takes several latents


@pytest.fixture(
    scope="module", params=["sm_90a", "sm_100a", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def target(request: pytest.FixtureRequest) -> Target:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else Simulator(request.param)


def build(config, options: str):
    from dsv4.kernels.rows import kv_insert

    return kv_insert.build(config, options)


@pytest.mark.parametrize(
    "case",
    [
        Case(11),
        Case(11, uniform_scale=True, has_special_rows=True, page=2),
        Case(7, 512, "bf16", page=61),
        pytest.param(Case(40, 128, has_special_rows=True), marks=pytest.mark.slow),
        Case(23, 128, "bf16", is_rounded=False),
        pytest.param(Case(70, 64, page=53), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_of_the_torch_implementation(target, case, seed) -> None:
    inputs = Inputs.make(case, seed, target.device)
    compiled = target.compile(build, case.config)
    outcome = run_all(target, compiled, lambda: inputs.call(FEW_CTAS), seed)
    assert_same_pool(outcome.scratch["pool"], inputs)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_block_of_the_kernel_runs(arch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    simulator = Simulator(arch)
    inputs = Inputs.make(Case(9), seed)
    outcome = simulator.run(simulator.compile(build, inputs.case.config), inputs.call(1))
    (coverage,) = outcome.report.coverage
    assert coverage.complete, coverage.missed


def test_no_latents_write_nothing(target, seed) -> None:
    inputs = Inputs.make(Case(0), seed, target.device)
    call = inputs.call(FEW_CTAS)
    target.run(target.compile(build, inputs.case.config), call)
    assert (frame_of(call.args[5]) == 0xA5).all()
