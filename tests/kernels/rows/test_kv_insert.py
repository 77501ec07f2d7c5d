"""The kernel against the torch implementation, byte for byte: in the simulator for both
architectures, with races and schedules, and on a GPU where there is one."""

from __future__ import annotations

import pytest

from dsv4.ops.kv_insert import KV_INSERT
from dsv4.testing.harness import Simulator, Target
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.kv_insert import FILL, Case, Inputs, assert_same_pool, frame_of

pytestmark = pytest.mark.stage("rows")

FEW_CTAS = 2  # each takes several latents


def run(target: Target, inputs: Inputs, num_ctas: int, seed: int = 0, schedules: int | None = None):
    """Run in the first few schedules; all bytes of each one's pool, and the last outcome."""
    kernels, pools = OpKernels(KV_INSERT, target), []
    compiled = kernels.compile(inputs.config)
    for schedule in target.schedules[:schedules]:
        pool = inputs.pool()
        call = inputs.call(kernels.planned_for, {"pool": pool}, num_ctas=num_ctas)
        outcome = target.run(compiled, call, schedule, seed)
        pools.append(frame_of(pool))
    return pools, outcome


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
    for pool in run(target, inputs, FEW_CTAS, seed)[0]:
        assert_same_pool(pool, inputs)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_block_of_the_kernel_runs(arch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    _, outcome = run(Simulator(arch), Inputs.make(Case(9), seed), 1, schedules=1)
    (coverage,) = outcome.report.coverage
    assert coverage.complete, coverage.missed


def test_no_latents_write_nothing(target, seed) -> None:
    inputs = Inputs.make(Case(0), seed, target.device)
    (pool,), _ = run(target, inputs, FEW_CTAS, schedules=1)
    assert (pool == FILL).all()
