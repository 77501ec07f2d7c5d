"""The model on GEMMs: clusters, multicast, neighbours that share tiles, and an H200's times."""

from __future__ import annotations

import pytest
import torch

from dsv4.simulator.api import Simulation
from dsv4.simulator.machine.memory import RANK_SHIFT
from dsv4.simulator.timing import B200, Prediction, predict
from dsv4.simulator.timing.recorder import record
from dsv4.simulator.timing.trace import BulkLoad
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm90_pipelined import PipelinedGemmSm90
from tests.simulator.kernels.gemm_sm100 import GemmSm100
from tests.simulator.timing.bounds import check_errors, check_means
from tests.simulator.timing.gemm_cases import (
    HELD_OUT_SIZES,
    MEASURED_HELD_OUT,
    SIZES,
    Measured,
    gemms,
    load,
)

pytestmark = pytest.mark.stage("simulator")


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    return a, b, torch.zeros(m, n)


def sm100(two_cta: bool, cluster: tuple[int, int], m: int, n: int, k: int) -> Prediction:
    tensors = operands(m, n, k)
    kernel = GemmSm100(two_cta, cluster)
    return predict(compile_kernel(kernel, "sm_100a", *tensors), *tensors)


def products(prediction: Prediction) -> dict[int, list[tuple[float, float]]]:
    """Intervals of the tensor pipe by SM."""
    found: dict[int, list[tuple[float, float]]] = {}
    for span in prediction.launches[0].spans:
        if "tensor pipe" in span.track:
            found.setdefault(int(span.track.split()[1]), []).append((span.start, span.stop))
    return found


@pytest.mark.parametrize("cluster", [(2, 1), (4, 2)], ids=["pair", "multicast"])
def test_a_pair_works_in_step(cluster):
    found = products(sm100(True, cluster, 512, 128, 192))
    assert len(found) == cluster[0] * cluster[1]
    for even in range(0, len(found), 2):
        assert found[even] == found[even + 1]


def test_each_cta_of_a_pair_receives_its_own_tiles():
    """Both signal the leader's barrier, but the bytes go through their own SM."""
    tensors = operands(512, 128, 192)
    compiled = compile_kernel(GemmSm100(True, (2, 1)), "sm_100a", *tensors)
    (launch,) = record(Simulation.of_compiled(compiled), tensors, {}, lambda count: [0])
    size = {0: 0, 1: 0}
    for warp in launch.clusters[0].warps:
        for event in (e for _, events in warp.blocks for e in events):
            if isinstance(event, BulkLoad):
                assert [rank for rank, _ in event.targets] == [warp.cta]
                assert {key[1] >> RANK_SHIFT for _, key in event.targets} == {0}
                size[warp.cta] += event.size
    assert size[0] == size[1] == (128 + 32) * 192 * 2


def test_deeper_products_take_the_tensor_pipe_longer():
    shallow, deep = (sm100(False, (1, 1), 256, 128, k).launches[0] for k in (192, 768))
    assert deep.busy["tensor pipe"] == pytest.approx(4 * shallow.busy["tensor pipe"])
    assert deep.cycles > shallow.cycles
    # 128 x 64 from shared memory: 48 cycles per 16 of K; two CTAs share an SM at most.
    steps = 768 // 16
    assert deep.busy["tensor pipe"] % (steps * B200.tcgen05_mma(1, 128, 64, False)[0]) == 0


def test_hopper_gemm():
    tensors = operands(128, 256, 192)
    launch = predict(compile_kernel(GemmSm90(), "sm_90a", *tensors), *tensors).launches[0]
    assert launch.busy["tensor pipe"] > 0
    assert launch.cycles > launch.busy[launch.critical_unit]


@pytest.mark.parametrize("cluster, chosen", [((1, 1), (0, 1)), ((2, 1), (0,))])
def test_neighbours_share_the_tile_of_b(cluster, chosen):
    """Of 128 x 128 tiles half of what a pair loads is the same, copied by each or by multicast."""
    tensors = operands(512, 256, 192)
    compiled = compile_kernel(PipelinedGemmSm90((128, 128, 64), cluster), "sm_90a", *tensors)
    simulation = Simulation.of_compiled(compiled)
    (launch,) = record(simulation, tensors, {}, lambda count: chosen)
    assert launch.pair_fraction == 0.75
    if cluster == (1, 1):
        (alone,) = record(simulation, tensors, {}, lambda count: [0])
        assert alone.pair_fraction == 1


MEASURED = load()
HELD_OUT = load(MEASURED_HELD_OUT)


def errors_of(measured: list[Measured]) -> dict[str, float]:
    """Relative error of the model by GEMM, positive when it is too slow."""
    return {str(m.gemm): m.gemm.predict().microseconds / m.microseconds - 1 for m in measured}


def test_every_gemm_is_measured():
    assert [m.gemm for m in MEASURED] == list(gemms())
    assert [m.gemm for m in HELD_OUT] == list(gemms(HELD_OUT_SIZES)) and len(HELD_OUT_SIZES) == 5
    assert not set(SIZES) & set(HELD_OUT_SIZES)


def test_h200_quick():
    check_errors(errors_of([m for m in MEASURED if m.gemm.m == 1024]))


@pytest.mark.slow
def test_h200_quick_of_a_size_held_out():
    check_errors(errors_of([m for m in HELD_OUT if m.gemm.m == HELD_OUT_SIZES[0][0]]))


@pytest.mark.slow
def test_h200_every_size_held_out():
    """No figure of the model has been set by these."""
    errors = errors_of(HELD_OUT)
    check_errors(errors)
    check_means(errors)


@pytest.mark.slow
def test_h200_every_measured_gemm():
    errors = errors_of(MEASURED)
    check_errors(errors)
    check_means(errors)
