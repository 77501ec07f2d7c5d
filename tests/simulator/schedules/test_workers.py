"""Several processes simulate one launch."""

import functools

import numpy as np
import pytest
import torch

from dsv4.simulator import simulate
from dsv4.simulator.api import Simulation
from dsv4.simulator.frontend.cutedsl import HostRunner
from dsv4.simulator.machine.memory import Region
from dsv4.simulator.ptx.parser import parse_module
from dsv4.simulator.races.cells.histories import EARLIER_LAUNCH, History
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm100 import GemmSm100
from tests.simulator.kernels.ticket import launch_token

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


@functools.cache
def _token_kernel():
    tensors = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    return compile_kernel(launch_token, "sm_90a", *tensors, torch.zeros(1, dtype=torch.int32))


def _pass_token(ptx: str, workers: int, schedule: str):
    """The report, the order in which CTAs had the token, and the sum of their numbers."""
    compiled = _token_kernel()
    token, order, total = (torch.zeros(n, dtype=torch.int32) for n in (1, 6, 1))
    simulation = Simulation(parse_module(ptx), functools.partial(HostRunner, compiled))
    report = simulation.run((token, order, total), {}, (), schedule, 0, workers=workers)
    return report, order.tolist(), int(total)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_ctas_communicate_through_global_memory(workers, schedule):
    ptx = _token_kernel().artifacts.PTX
    report, order, total = _pass_token(ptx, workers, schedule)
    assert order == [5, 4, 3, 2, 1, 0]
    assert total == sum(order)
    assert not report.races


@pytest.mark.parametrize("workers", [1, 2, 6])
@pytest.mark.parametrize("weakened", ["release", "acquire"])
def test_races_between_workers_are_found(workers, weakened):
    """Whatever process a cluster ran in: without its half of the order, `total` is a race."""
    ptx = _token_kernel().artifacts.PTX
    changed = ptx.replace(f".{weakened}.", ".relaxed.")
    assert changed != ptx
    report, order, total = _pass_token(changed, workers, "eager")
    assert {f.kind for f in report.races} == {"read-write race", "write-write race"}
    # Run twice where workers met, counted and written once.
    assert total == sum(order) == 15
    one = _pass_token(ptx, 1, "eager")[0].launches[0]
    assert report.launches[0].operations == one.operations


def test_what_the_launch_before_did_is_no_conflict():
    """Both workers of a launch that may start early know of it; neither of them did it."""
    data = torch.zeros(64, dtype=torch.uint8)
    region = Region(data.data_ptr(), 64, "data")
    before, launch = History(region), History(region)
    before.note_write(np.arange(4), owner=0, clock=1, code=0)
    launch.follow(before.footprint(), EARLIER_LAUNCH)
    own = launch.footprint()
    assert not own.conflicts(own)
    launch.note_write(np.arange(3, 5), owner=0, clock=1, code=0)
    own = launch.footprint()
    assert own.written.nonzero()[0].tolist() == [3, 4]
    assert own.conflicts(own)
    assert launch.footprint(earlier=True).written.nonzero()[0].tolist() == [0, 1, 2]


def test_workers_must_be_positive():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        simulate(None, workers=0)
