"""Order beyond one CTA's life: launches that overlap, and CTAs that exit too early."""

import functools

import cutlass
import pytest
import torch
from cutlass import cute

from dsv4.simulator import KernelFault, simulate
from dsv4.simulator.api import Simulation
from dsv4.simulator.host import HostRunner
from dsv4.simulator.ptx.parser import parse_module
from tests.simulator.ptx import kinds
from tests.simulator.support import compile_kernel

pytestmark = pytest.mark.stage("simulator")


@cute.kernel
def _produce(values: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_launch_dependents()
    values[thread] = thread


@cute.kernel
def _consume(values: cute.Tensor, result: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_wait()
    result[thread] = values[31 - thread]


def _launcher(overlapping: bool):
    @cute.jit
    def launch(values: cute.Tensor, result: cute.Tensor, stream):
        one, threads = (1, 1, 1), (32, 1, 1)
        _produce(values).launch(grid=one, block=threads, stream=stream)
        _consume(values, result).launch(
            grid=one, block=threads, stream=stream, use_pdl=cutlass.const_expr(overlapping)
        )

    return launch


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("overlapping", [True, False])
def test_a_launch_that_may_start_early_waits(overlapping, workers):
    values, result = (torch.zeros(32, dtype=torch.int32) for _ in range(2))
    compiled = compile_kernel(_launcher(overlapping), "sm_90a", values, result)
    ptx = compiled.artifacts.PTX
    for text, clean in ((ptx, True), (ptx.replace("griddepcontrol.wait;", ""), not overlapping)):
        simulation = Simulation(parse_module(text), functools.partial(HostRunner, compiled))
        report = simulation.run((values, result), {}, (), "eager", 0, workers=workers)
        assert result.tolist() == list(range(31, -1, -1))
        expected = set() if clean else {"race with the launch before"}
        assert {f.kind for f in report.races} == expected


_CLUSTER_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_a_cta_outlives_what_its_peer_stores_to_it(schedule):
    body = f"""
    {_CLUSTER_SYNC}
    mapa.shared::cluster.u32 %r8, %r4, 1;
    @!%p3 bra JOIN;
    st.shared::cluster.b32 [%r8], %r1;
    JOIN:
    {{last}}
    """
    options = {"grid": 2, "cluster": 2, "schedule": schedule}
    assert kinds(body.format(last=_CLUSTER_SYNC), **options) == []
    assert kinds(body.format(last=""), **options) == ["access to a CTA that may have exited"]


def test_a_cta_outlives_its_own_copies():
    body = """
    add.s32 %r30, %r2, 2048;
    @!%p2 bra READY;
    mbarrier.init.shared.b64 [%r30], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, [%r30];
    READY:
    bar.sync 0;
    {wait}
    """
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;\n@!%p6 bra W;"
    assert kinds(body.format(wait=wait)) == []
    assert kinds(body.format(wait="")) == ["access to a CTA that may have exited"]


@cute.kernel
def _meet(flags: cute.Tensor):
    """Every CTA waits for the last one."""
    block, _, _ = cute.arch.block_idx()
    last, _, _ = cute.arch.grid_dim()
    flag = flags.iterator + last - 1
    cute.arch.store(flags.iterator + block, cutlass.Int32(1), sem="release", scope="gpu")
    while cute.arch.load(flag, cutlass.Int32, sem="acquire", scope="gpu") == 0:
        pass


@pytest.mark.parametrize(
    ("shared", "fit"), [(0, 32 * 132), (76 * 1024, 2 * 132), (227 * 1024, 132)]
)
def test_a_cooperative_launch_fits_the_gpu(shared, fit):
    def launch(ctas):
        @cute.jit
        def call(flags: cute.Tensor, stream):
            _meet(flags).launch(
                grid=(ctas, 1, 1), block=(32, 1, 1), smem=shared, stream=stream, cooperative=True
            )

        flags = torch.zeros(ctas, dtype=torch.int32)
        return simulate(compile_kernel(call, "sm_90a", flags), flags, races=False)

    if shared:
        launch(fit)
    with pytest.raises(KernelFault, match=rf"{fit + 1} CTAs, {fit} fit 132 .* error 720"):
        launch(fit + 1)
