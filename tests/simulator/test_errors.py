"""What a wrong kernel or a wrong environment is told: one clear error with both places."""

import re

import pytest
import torch

from dsv4.simulator import (
    Deadlock,
    KernelFault,
    SimulatorError,
    UnsupportedInstruction,
    simulate,
    simulate_ptx,
)
from dsv4.simulator.frontend import cutedsl as host
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm100 import GemmSm100
from tests.simulator.races.test_races import _run

pytestmark = pytest.mark.stage("simulator")

_HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.file 1 "/somewhere/kernel.py"
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 out)
{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<8>;
ld.param.b64 %d1, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, smem;
setp.eq.u32 %p1, %r1, 0;
.loc 1 77 0
"""


def _simulate(body: str, *, threads: int = 32, schedule: str = "eager", grid: int = 1):
    out = torch.zeros(64, dtype=torch.int32)
    return simulate_ptx(
        _HEADER + body + "\nret;\n}\n", "k", grid=(grid, 1, 1), block=(threads, 1, 1),
        params=(out,), shared=1024, schedule=schedule,
    )  # fmt: skip


def test_unknown_opcode_names_itself_and_both_lines():
    with pytest.raises(UnsupportedInstruction) as caught:
        _simulate("frobnicate.sync.b32 %r3, %r1;")
    text = str(caught.value)
    line = (_HEADER + "x").count("\n") + 1
    assert "frobnicate.sync.b32" in text
    assert f"PTX line {line}" in text
    assert "/somewhere/kernel.py:77" in text


def test_a_call_names_itself_and_both_lines():
    with pytest.raises(UnsupportedInstruction, match=r"call of f, .*PTX line \d+ .*kernel\.py:77"):
        _simulate("{ .param .b64 param0;\ncall.uni f, (param0);\n}")


def test_unknown_form_of_a_known_opcode():
    with pytest.raises(UnsupportedInstruction, match=r"wgmma\.mma_async\.sp.*kernel\.py:77"):
        _simulate("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r3}, %d1, %d1, %p1;")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%d1+4096], %r1;", "outside every argument tensor"),
        ("ld.global.b32 %r3, [%d1+-4];", "outside every argument tensor"),
        ("st.global.b32 [%d1+2], %r1;", "misaligned global access of 4 bytes"),
        ("st.shared.b32 [%r2+1024], %r1;", "past the CTA's"),
        ("st.shared.b64 [%r2+4], %d1;", "misaligned shared access of 8 bytes"),
        ("mbarrier.arrive.shared.b64 %d2, [%r2];", "never initialised"),
        ("mbarrier.init.shared.b64 [%r2], 0;", "count 0"),
        ("bar.sync 16;", "named barrier 16"),
        ("bar.sync 1, 48;", "not a multiple of 32"),
        ("trap;", "trap"),
    ],
)
def test_faults_name_the_place(body, message):
    with pytest.raises(KernelFault, match=re.escape(message)) as caught:
        _simulate(body)
    assert "kernel.py:77" in str(caught.value)
    assert "CTA (0, 0, 0) warp 0" in str(caught.value)


def test_over_arrival():
    body = "mbarrier.init.shared.b64 [%r2], 2;\nmbarrier.arrive.shared.b64 %d2, [%r2], 3;"
    with pytest.raises(KernelFault, match="over-arrival: 3 more, 2 of 2 pending in phase 0"):
        _simulate(f"@!%p1 bra DONE;\n{body}\nDONE:")


@pytest.mark.parametrize(
    "steps",
    [
        "expect_tx 1048576",
        "complete_tx 524288; complete_tx 524288",
        "expect_tx 1048575; expect_tx 1",
    ],
)
def test_transaction_counts_have_a_range(steps):
    body = "mbarrier.init.shared.b64 [%r2], 1;\n"
    for step in steps.split("; "):
        operation, size = step.split()
        body += f"mbarrier.{operation}.relaxed.cta.shared::cta.b64 [%r2], {size};\n"
    with pytest.raises(KernelFault, match=r"1048576 bytes pending, the count holds -1048575\.\."):
        _simulate(f"@!%p1 bra DONE;\n{body}\nDONE:")


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_deadlock_says_who_waits_for_what(schedule):
    body = """
    add.u32 %r3, %r2, 512;
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r3], 1;
    READY:
    bar.sync 0;
    shr.u32 %r4, %r1, 5;
    setp.eq.u32 %p2, %r4, 0;
    @%p2 bra FIRST;
    bar.sync 3, 64;
    bra DONE;
    FIRST:
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0, 1000;
    @!%p3 bra W;
    DONE:
    """
    with pytest.raises(Deadlock) as caught:
        _simulate(body, threads=64, schedule=schedule)
    text = str(caught.value)
    assert "warp 0 waits for mbarrier rank 0 offset 0x600: phase 0, 1 of 1 arrivals" in text
    assert "warp 1 waits for barrier 3 (32 of 64 threads arrived)" in text
    assert text.count("kernel.py:77") == 2


def test_waiting_for_a_flag_nobody_sets():
    body = """
    W: ld.acquire.gpu.global.b32 %r3, [%d1];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra W;
    """
    with pytest.raises(Deadlock, match="no warp can make progress"):
        _simulate(body)


# --- the environment -----------------------------------------------------------------------------
def _compiled():
    operands = (torch.zeros(64, 64).bfloat16(), torch.zeros(128, 64).bfloat16())
    result = torch.zeros(64, 128)
    return compile_kernel(GemmSm90(), "sm_90a", *operands, result), (*operands, result)


def test_unsupported_compiler_version(monkeypatch):
    monkeypatch.setattr(host.metadata, "version", lambda name: "5.1.0")
    with pytest.raises(SimulatorError, match=r"nvidia-cutlass-dsl 5\.1\.0 .* supports 4\.8\.x"):
        host.check_version()


def test_bad_arguments():
    compiled, operands = _compiled()
    with pytest.raises(ValueError, match="schedule must be one of eager, lazy, random, got 'fast'"):
        simulate(compiled, *operands, schedule="fast")
    with pytest.raises(SimulatorError, match="--keep-ptx"):
        simulate(object())
    meta = operands[0].to("meta")
    with pytest.raises(ValueError, match="a is on meta, simulate takes CPU tensors"):
        simulate(compiled, meta, *operands[1:])


# --- planted mistakes ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def blackwell():
    m, n = 128, 64
    operands = (torch.randn(m, 192).bfloat16(), torch.randn(n, 192).bfloat16(), torch.zeros(m, n))
    return compile_kernel(GemmSm100(), "sm_100a", *operands), operands


def _mutated(blackwell, pattern: str, replacement: str):
    """Findings and correctness of the GEMM with the first match of `pattern` replaced."""
    compiled, operands = blackwell
    ptx, count = re.subn(pattern, replacement, compiled.artifacts.PTX, count=1)
    assert count == 1, f"{pattern} is not in the kernel"
    operands[2].fill_(float("nan"))
    report = _run(compiled, ptx, operands, "eager")
    expected = operands[0].float() @ operands[1].float().T
    return {f.kind for f in report.races}, torch.allclose(operands[2], expected, atol=1e-3)


def test_first_product_must_overwrite(blackwell):
    kinds, _ = _mutated(
        blackwell, r"(tcgen05\.mma\S+ .*), (%p\d+);", r"setp.eq.u32 \2, 0, 0;\n\1, \2;"
    )
    assert "uninitialised read" in kinds


def test_wrong_tmem_offset(blackwell):
    with pytest.raises(KernelFault, match="not all allocated"):
        _mutated(blackwell, r"(tcgen05\.ld\.\S+ \{[^}]*\}, \[%r\d+)\]", r"\1+48]")


# Both operands' descriptors: 128-byte swizzle, 1024 bytes between groups of eight rows.
DESCRIPTOR = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16


@pytest.mark.parametrize(
    "wrong",
    [
        4 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16,
        2 << 61 | 1 << 46 | (512 >> 4) << 32 | 1 << 16,
    ],
    ids=["swizzle", "stride"],
)
def test_wrong_descriptor_is_noticed(blackwell, wrong):
    kinds, correct = _mutated(blackwell, rf"\b{DESCRIPTOR}\b", str(wrong))
    assert kinds or not correct


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_barriers_do_not_wait_for_threads_that_have_exited(schedule):
    body = """
    shr.u32 %r4, %r1, 5;
    setp.eq.u32 %p2, %r4, 1;
    @%p2 exit;
    bar.sync 0;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    bar.sync 0;
    @%p1 st.global.b32 [%d1], 7;
    """
    _simulate(body, threads=96, schedule=schedule)
