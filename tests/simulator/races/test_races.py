"""The checker: correct kernels are clean; kernels with a synchronisation removed are not."""

import functools
import re

import pytest
import torch

from dsv4.simulator import Report, UnsupportedInstruction
from tests.simulator.helpers.mutations import (
    Run,
    known_warnings,
    noticed,
    simulate_text,
    sync_instructions,
    weakened,
    without,
)
from tests.simulator.helpers.ptx import kinds
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm100 import GemmSm100

pytestmark = pytest.mark.stage("simulator")


@functools.cache
def _kernel(name: str):
    m, n = {"sm90": (64, 128), "one": (128, 64), "pair": (256, 64)}[name]
    operands = (torch.randn(m, 320).bfloat16(), torch.randn(n, 320).bfloat16(), torch.zeros(m, n))
    kernel = GemmSm90() if name == "sm90" else GemmSm100(name == "pair", (m // 128, 1))
    arch = "sm_90a" if name == "sm90" else "sm_100a"
    return compile_kernel(kernel, arch, *operands), operands


def _run(compiled, ptx: str, operands, schedule: str) -> Report:
    return simulate_text(compiled, ptx, Run(lambda: (operands, {}), schedule=schedule))[0]


@pytest.mark.parametrize("name", ["one", "pair", "sm90"])
def test_deleting_any_synchronisation_is_noticed(name):
    compiled, operands = _kernel(name)
    runs = [Run(lambda: (operands, {}))]
    known = known_warnings(compiled, runs)
    ptx = compiled.artifacts.PTX
    missed = [
        i.opcode
        for i in sync_instructions(ptx)
        if not noticed(compiled, without(ptx, i), runs, known)
    ]
    # Warp 0 alone waits for an empty stage, and only after it waited for the wgmmas that read it:
    # one operation of the whole warpgroup. The wait is redundant in a kernel of one warpgroup.
    redundant = ["mbarrier.try_wait.parity.shared.b64"] if name == "sm90" else []
    assert missed == redundant


def test_a_change_that_is_refused_was_not_noticed():
    compiled, operands = _kernel("sm90")
    ptx = compiled.artifacts.PTX
    fence = next(
        i for i in sync_instructions(ptx) if i.opcode == "fence.mbarrier_init.release.cluster"
    )
    text = weakened(ptx, fence, "fence.mbarrier_init.relaxed.cluster")
    with pytest.raises(UnsupportedInstruction, match="is not simulated"):
        noticed(compiled, text, [Run(lambda: (operands, {}))], set())


def test_a_race_names_both_places():
    compiled, operands = _kernel("sm90")
    ptx = compiled.artifacts.PTX
    (wait,) = (i for i in sync_instructions(ptx) if i.opcode.startswith("wgmma.wait_group"))
    report = _run(compiled, without(ptx, wait), operands, "eager")
    race = next(f for f in report.races if f.kind == "read-write race")
    assert len(race.places) == 2
    assert "wgmma.mma_async" in race.places[0]
    assert "cp.async.bulk.tensor" in race.places[1]
    assert all(re.search(r"gemm_sm90\.py:\d+", place) for place in race.places)
    with pytest.raises(AssertionError, match="read-write race"):
        report.raise_if_racy()


def test_exchange_through_shared_memory_needs_a_barrier():
    exchange = """
    st.shared.b32 [%r4], %r1;
    {barrier}
    xor.b32 %r6, %r3, 128;
    add.s32 %r7, %r2, %r6;
    ld.shared.b32 %r8, [%r7];
    """
    assert kinds(exchange.format(barrier="bar.sync 0;")) == []
    assert kinds(exchange.format(barrier="")) != []


def test_reuse_of_shared_memory_needs_a_barrier():
    reuse = """
    st.shared.b32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r6, %r3, 128;
    add.s32 %r7, %r2, %r6;
    ld.shared.b32 %r8, [%r7];
    {barrier}
    st.shared.b32 [%r4], %r8;
    """
    assert kinds(reuse.format(barrier="bar.sync 0;")) == []
    assert kinds(reuse.format(barrier="")) == ["read-write race"]


def test_bar_arrive_orders_what_came_before_it_alone():
    producer = """
    @%p1 bra CONSUME;
    st.shared.b32 [%r4], %r1;
    bar.arrive 1, 64;
    {after}
    bra DONE;
    CONSUME:
    bar.sync 1, 64;
    ld.shared.b32 %r8, [%r4+128];
    DONE:
    """
    assert kinds(producer.format(after="")) == []
    assert kinds(producer.format(after="st.shared.b32 [%r4], %r1;")) == ["read-write race"]


def test_uninitialised_read():
    assert kinds("ld.shared.b32 %r8, [%r4];") == ["uninitialised read"]


def test_neighbouring_bytes_do_not_race():
    body = "cvt.u16.u32 %h1, %r1; add.s32 %r9, %r2, %r1; st.shared.b8 [%r9], %h1;"
    assert kinds(".reg .b16 %h1; " + body) == []


def test_bulk_store_needs_a_proxy_fence_and_a_wait():
    store = """
    st.shared.b32 [%r4], %r1;
    {fence}
    bar.sync 0;
    @!%p2 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 256;
    cp.async.bulk.commit_group;
    {wait}
    DONE:
    """
    fence, wait = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"
    assert kinds(store.format(fence=fence, wait=wait)) == []
    assert kinds(store.format(fence="", wait=wait)) == ["missing proxy fence"]
    assert kinds(store.format(fence=fence, wait="")) == ["leak"]


def test_mbarrier_carries_order():
    pingpong = """
    add.s32 %r10, %r2, 512;
    @!%p2 bra READY;
    mbarrier.init.shared.b64 [%r10], 32;
    fence.mbarrier_init.release.cluster;
    READY:
    bar.sync 0;
    @%p1 bra CONSUME;
    st.shared.b32 [%r4], %r1;
    mbarrier.arrive.shared.b64 %d2, [%r10];
    bra DONE;
    CONSUME:
    {wait}
    ld.shared.b32 %r8, [%r4+128];
    DONE:
    """
    wait = """
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0, 1000;
    @!%p3 bra W;"""
    assert kinds(pingpong.format(wait=wait)) == []
    assert kinds(pingpong.format(wait="")) != []


@pytest.mark.parametrize(
    ("store", "load", "clean"),
    [
        ("st.release.gpu.global.b32", "ld.acquire.gpu.global.b32", True),
        ("st.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32", False),
        ("st.release.gpu.global.b32", "ld.relaxed.gpu.global.b32", False),
    ],
)
def test_order_between_ctas_comes_from_release_and_acquire(store, load, clean):
    flag = f"""
    mov.u32 %r10, %ctaid.x;
    setp.ne.u32 %p4, %r10, 0;
    @!%p2 bra DONE;
    @%p4 bra CONSUME;
    st.global.b32 [%d1+64], 7;
    {store} [%d1], 1;
    bra DONE;
    CONSUME:
    SPIN: {load} %r11, [%d1];
    setp.eq.u32 %p5, %r11, 0;
    @%p5 bra SPIN;
    ld.global.b32 %r12, [%d1+64];
    DONE:
    """
    found = kinds(flag, grid=2)
    assert found == ([] if clean else ["read-write race"])
