"""Order beyond one CTA's life: launches that overlap, and CTAs that exit too early."""

import functools

import cutlass
import pytest
import torch
from cutlass import cute

from dsv4.simulator import KernelFault, simulate
from dsv4.simulator.api import Simulation
from dsv4.simulator.frontend.cutedsl import HostRunner
from dsv4.simulator.ptx.parser import parse_module
from tests.simulator.helpers.ptx import kinds
from tests.simulator.helpers.support import compile_kernel

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


@cute.kernel
def _add_one(source: cute.Tensor, target: cute.Tensor, wait: cutlass.Constexpr):
    """target = source + 1, in 4 CTAs."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(wait):
        cute.arch.griddepcontrol_wait()
    i = 32 * block + thread
    target[i] = source[127 - i] + 1


_TOUCHES_NOTHING = 1  # a launch that neither waits nor touches what the others do


def _chain(waits: tuple[bool, ...]):
    """Launches that hand 128 words on, forwards and backwards."""

    @cute.jit
    def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, stream):
        for i, wait in enumerate(waits):
            source, target = (a, b) if i % 2 == 0 else (b, a)
            if cutlass.const_expr(not wait and i == _TOUCHES_NOTHING):
                source, target = c, d
            _add_one(source, target, wait).launch(
                grid=(4, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True
            )

    return launch


def _run_chain(waits: tuple[bool, ...], **options):
    tensors = [torch.zeros(128, dtype=torch.int32) for _ in range(4)]
    compiled = compile_kernel(_chain(waits), "sm_90a", *tensors)
    return tensors, simulate(compiled, *tensors, **options)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("overlap", ["none", "all", "random"])
def test_overlapped_launches_that_wait_give_one_result(overlap, schedule, seed):
    early = []
    for k in range(4 if overlap == "random" else 1):
        options = {"overlap": overlap, "schedule": schedule, "seed": seed + k, "races": False}
        (a, b, *_), report = _run_chain((True,) * 4, **options)
        early.append(report.early_starts)
        assert a.tolist() == [4] * 128 and b.tolist() == [3] * 128
        assert len(report.launches) == 4
    assert {"none": early == [0], "all": early == [3], "random": sum(early) > 0}[overlap]


def test_an_early_launch_that_does_not_wait_reads_too_early():
    results = set()
    for overlap in ("none", "all"):
        (a, *_), _ = _run_chain((True, True, True, False), overlap=overlap, races=False)
        results.add(tuple(a.tolist()))
    assert len(results) == 2


def test_overlap_and_the_checker_are_apart():
    with pytest.raises(ValueError, match="overlap needs races=False"):
        _run_chain((True, True), overlap="all")
    with pytest.raises(ValueError, match="overlap must be one of none, all, random"):
        _run_chain((True, True), overlap="some", races=False)


def test_a_launch_that_did_not_wait_hides_the_one_before_it():
    """The third launch waits for the second alone, which is complete before the first may be."""
    _, report = _run_chain((True, True, True))
    assert not report.races
    _, report = _run_chain((True, False, True))
    assert {f.kind for f in report.races} == {"race with the launch before"}
    assert "the launch between them has not waited for it" in report.races[0].message


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


_RELAXED = _CLUSTER_SYNC.replace("release", "relaxed")


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize(
    ("first", "clean"),
    [
        (_CLUSTER_SYNC, True),
        (_RELAXED, True),  # nothing of memory, but that every CTA runs
        (f"@%p1 bra W;\n{_RELAXED}\nbra S;\nW: {_RELAXED}\nS: bar.sync 0;", True),
        ("barrier.cluster.arrive.release.aligned;", False),
        ("bar.sync 0;", False),
    ],
)
def test_a_cta_has_started_before_its_peer_stores_to_it(first, clean, schedule):
    wait = "" if "wait" in first or first == "bar.sync 0;" else "barrier.cluster.wait.acquire;"
    body = f"""
    {first}
    mapa.shared::cluster.u32 %r8, %r4, 1;
    @!%p3 bra JOIN;
    st.shared::cluster.b32 [%r8], %r1;
    JOIN:
    {wait}
    {_CLUSTER_SYNC}
    """
    found = kinds(body, grid=2, cluster=2, schedule=schedule)
    assert found == ([] if clean else ["access to a CTA that may not have started"])


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
