"""The kernel against the torch implementation, number for number: in the simulator for both
architectures, with races and schedules."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.step.config import StepIndicesConfig
from dsv4.ops.step_indices import STEP_INDICES
from dsv4.testing.harness import Simulator, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.step_indices import Case, Inputs, expected

pytestmark = pytest.mark.stage("rows")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "case",
    [
        Case(37),
        Case(6, 3, 300),
        Case(1, 1, 1),
        pytest.param(Case(5, 9, 4, StepIndicesConfig(140, 12, 3)), marks=pytest.mark.slow),
        pytest.param(Case(5, 2, 4, StepIndicesConfig(16, 7)), marks=pytest.mark.slow),
    ],
    ids=["rows", "drafts", "one", "one ratio", "no entries"],
)
def test_numbers_of_the_torch_implementation(arch, case, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(case, seed)
    outcome = OpKernels(STEP_INDICES, simulator(arch)).run(inputs, seed, None)
    wanted = expected(inputs)
    assert outcome.outputs.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(outcome.outputs[name], tensor), name


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_block_of_the_kernel_runs(arch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(Case(300, 2, 40), seed)
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    outcome = OpKernels(STEP_INDICES, Simulator(arch)).run(inputs, seed, num_ctas=1)
    (coverage,) = outcome.report.coverage
    assert coverage.complete, coverage.missed
