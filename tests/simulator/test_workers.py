"""Several processes simulate one launch."""

import pytest
import torch

from dsv4.simulator import simulate
from tests.simulator.kernels.gemm_sm100 import GemmSm100
from tests.simulator.kernels.ticket import launch_token
from tests.simulator.support import compile_kernel

pytestmark = pytest.mark.stage("simulator")


def test_results_do_not_depend_on_the_number_of_workers(seed):
    a, b = torch.randn(512, 192).bfloat16(), torch.randn(128, 192).bfloat16()
    whole = torch.full((512, 160), float("nan"))
    c = whole[:, :128]  # a view: what lies beside it must survive
    compiled = compile_kernel(GemmSm100(True, (2, 1)), "sm_100a", a, b, c)
    reports, results = [], []
    for workers in (1, 3):
        whole.fill_(float("nan"))
        reports.append(simulate(compiled, a, b, c, workers=workers))
        results.append(whole.clone())
    assert torch.equal(results[0][:, :128], results[1][:, :128])
    assert results[1][:, 128:].isnan().all()
    one, three = (report.launches[0] for report in reports)
    assert one.operations == three.operations
    assert one.instructions == three.instructions
    assert three.coverage.complete, three.coverage.missed
    assert not reports[1].races


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_ctas_communicate_through_global_memory(workers, schedule):
    token, order = torch.zeros(1, dtype=torch.int32), torch.full((6,), -1, dtype=torch.int32)
    compiled = compile_kernel(launch_token, "sm_90a", token, order)
    report = simulate(compiled, token, order, workers=workers, schedule=schedule)
    assert order.tolist() == [5, 4, 3, 2, 1, 0]
    assert not report.races


def test_workers_must_be_positive():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        simulate(None, workers=0)
