"""The checker: correct kernels are clean; kernels with a synchronisation removed are not."""

import functools
import re

import pytest
import torch

from dsv4.simulator import Report, SimulatorError, simulate_ptx
from dsv4.simulator.api import Simulation
from dsv4.simulator.codegen import is_sync
from dsv4.simulator.host import HostRunner
from dsv4.simulator.ptx.parser import Instruction, parse_module
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm100 import GemmSm100
from tests.simulator.support import compile_kernel

pytestmark = pytest.mark.stage("simulator")

# Work, not order: without these the result is wrong, which is not the checker's business.
_WORK = ("tcgen05.mma", "wgmma.mma", "tcgen05.ld", "cp.async.bulk.tensor", "mbarrier.init",
         "tcgen05.relinquish")  # fmt: skip


@functools.cache
def _kernel(name: str):
    m, n = {"sm90": (64, 128), "one": (128, 64), "pair": (256, 64)}[name]
    operands = (torch.randn(m, 320).bfloat16(), torch.randn(n, 320).bfloat16(), torch.zeros(m, n))
    kernel = GemmSm90() if name == "sm90" else GemmSm100(name == "pair", (m // 128, 1))
    arch = "sm_90a" if name == "sm90" else "sm_100a"
    return compile_kernel(kernel, arch, *operands), operands


def _sync_instructions(ptx: str) -> list[Instruction]:
    (entry,) = parse_module(ptx).entries.values()
    return [i for i in entry.instructions if is_sync(i.opcode) and not i.opcode.startswith(_WORK)]


def _without(ptx: str, ins: Instruction) -> str:
    """The module without one instruction; a wait succeeds at once."""
    lines = ptx.split("\n")
    line = lines[ins.ptx_line - 1]
    opcode = re.escape(ins.opcode)
    if "try_wait" in ins.opcode:
        changed = re.sub(opcode + r"\s+(\S+), .*?;", r"setp.eq.u32 \1, 0, 0;", line, count=1)
    else:
        changed = re.sub(r"(@!?\S+\s+)?" + opcode + r"[^;]*;", "", line, count=1)
    assert changed != line
    lines[ins.ptx_line - 1] = changed
    return "\n".join(lines)


def _run(compiled, ptx: str, operands, schedule: str) -> Report:
    simulation = Simulation(parse_module(ptx), functools.partial(HostRunner, compiled))
    return simulation.run(operands, {}, (), schedule, 0)


@pytest.mark.parametrize("name", ["one", "pair", "sm90"])
def test_deleting_any_synchronisation_is_noticed(name):
    compiled, operands = _kernel(name)
    ptx = compiled.artifacts.PTX
    assert not _run(compiled, ptx, operands, "eager").races
    missed = []
    for ins in _sync_instructions(ptx):
        try:
            report = _run(compiled, _without(ptx, ins), operands, "eager")
        except SimulatorError:
            continue
        noticed = report.races or report.warnings
        if not noticed:
            missed.append(ins.opcode)
    # Warp 0 alone waits for an empty stage, and only after it waited for the wgmmas that read it:
    # one operation of the whole warpgroup. The wait is redundant in a kernel of one warpgroup.
    redundant = ["mbarrier.try_wait.parity.shared.b64"] if name == "sm90" else []
    assert missed == redundant


def test_a_race_names_both_places():
    compiled, operands = _kernel("sm90")
    ptx = compiled.artifacts.PTX
    (wait,) = (i for i in _sync_instructions(ptx) if i.opcode.startswith("wgmma.wait_group"))
    report = _run(compiled, _without(ptx, wait), operands, "eager")
    race = next(f for f in report.races if f.kind == "read-write race")
    assert len(race.places) == 2
    assert "wgmma.mma_async" in race.places[0]
    assert "cp.async.bulk.tensor" in race.places[1]
    assert all(re.search(r"gemm_sm90\.py:\d+", place) for place in race.places)
    with pytest.raises(AssertionError, match="read-write race"):
        report.raise_if_racy()


_HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 out)
{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<8>;
ld.param.b64 %d1, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, smem;
shl.b32 %r3, %r1, 2;
add.s32 %r4, %r2, %r3;
shr.u32 %r5, %r1, 5;
setp.eq.u32 %p1, %r5, 0;
setp.eq.u32 %p2, %r1, 0;
"""


def _kinds(body: str, *, threads: int = 64, out: int = 256, **options) -> list[str]:
    text = _HEADER + body + "\nret;\n}\n"
    tensor = torch.zeros(out, dtype=torch.int32)
    report = simulate_ptx(
        text, "k", grid=(options.pop("grid", 1), 1, 1), block=(threads, 1, 1), params=(tensor,),
        shared=1024, **options,
    )  # fmt: skip
    return sorted({f.kind for f in report.races})


def test_exchange_through_shared_memory_needs_a_barrier():
    exchange = """
    st.shared.b32 [%r4], %r1;
    {barrier}
    xor.b32 %r6, %r3, 128;
    add.s32 %r7, %r2, %r6;
    ld.shared.b32 %r8, [%r7];
    """
    assert _kinds(exchange.format(barrier="bar.sync 0;")) == []
    assert _kinds(exchange.format(barrier="")) != []


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
    assert _kinds(reuse.format(barrier="bar.sync 0;")) == []
    assert _kinds(reuse.format(barrier="")) == ["read-write race"]


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
    assert _kinds(producer.format(after="")) == []
    assert _kinds(producer.format(after="st.shared.b32 [%r4], %r1;")) == ["read-write race"]


def test_uninitialised_read():
    assert _kinds("ld.shared.b32 %r8, [%r4];") == ["uninitialised read"]


def test_neighbouring_bytes_do_not_race():
    body = "cvt.u16.u32 %h1, %r1; add.s32 %r9, %r2, %r1; st.shared.b8 [%r9], %h1;"
    assert _kinds(".reg .b16 %h1; " + body) == []


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
    assert _kinds(store.format(fence=fence, wait=wait)) == []
    assert _kinds(store.format(fence="", wait=wait)) == ["missing proxy fence"]
    assert _kinds(store.format(fence=fence, wait="")) == ["leak"]


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
    assert _kinds(pingpong.format(wait=wait)) == []
    assert _kinds(pingpong.format(wait="")) != []


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
    kinds = _kinds(flag, grid=2)
    assert kinds == ([] if clean else ["read-write race"])
