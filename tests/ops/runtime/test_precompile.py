"""`dsv4 compile`: child processes, outcomes, the report, the command."""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dsv4.cli import compile as command
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import precompile, registry
from dsv4.ops.runtime.precompile import Outcome
from dsv4.ops.runtime.report import KernelReport, kernel_reports
from dsv4.ops.step_indices import STEP_INDICES

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel compiler exists for Linux only"
)

REMARKS = """
remark[ptxas info]: ptxas output: ptxas info    : (C7519) warpgroup.arrive is injected in around \
line 1041 by compiler to allow use of registers in GMMA in function 'kernel_cutlass_Combine_1'
ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to divergent path in the function 'kernel_cutlass_scale_0'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_cutlass_Combine_object_at__x_1' for 'sm_90a'
ptxas info    : Function properties for kernel_cutlass_Combine_object_at__x_1
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 43 registers, used 0 barriers
ptxas info    : Compiling entry function 'kernel_cutlass_scale_0' for 'sm_90a'
ptxas info    : Function properties for kernel_cutlass_scale_0
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""

IR = """
!memref_smem_i8 = !cute.memref<i8, smem, align<1024>, "232448:1">
!memref_smem_f32 = !cute.memref<f32, smem, align<1024>, "(64,4):(1,64)">
!memref_rmem = !cute.memref<f32, rmem, align<32>, "4:1">
    cuda.kernel @kernel_cutlass_scale_0(%arg0: i32) {
      %smem = cute.memref.alloca() {smem.partition_id = 1 : i32} : !memref_smem_i8
      %more = cute.memref.alloca() : !cute.memref<i8, smem, align<16>, "64:1">
      %rmem = cute.memref.alloca() : !memref_rmem
    cuda.kernel @kernel_cutlass_Combine_object_at__x_1(%arg0: i32) {
      %rmem = cute.memref.alloca() : !memref_rmem
"""


def test_report_is_read() -> None:
    assert kernel_reports(REMARKS, IR) == [
        KernelReport("Combine", 43, 0, 0, 0, 0),
        KernelReport("kernel_cutlass_scale_0", 168, 16, 8, 12, 232448 + 64, serialized=True),
    ]
    assert kernel_reports("nothing of interest", "") == []


def test_reports_of_wrapped_remarks():
    """As the compiler prints them when a kernel spills: indented, and wrapped at spaces."""
    wrapped = textwrap.fill(REMARKS, 48, subsequent_indent=" " * 10, break_long_words=False)
    assert "entry function\n" in wrapped
    assert kernel_reports(wrapped, IR) == kernel_reports(REMARKS, IR)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["compile", *arguments])


def test_command_offers_every_architecture() -> None:
    with pytest.raises(SystemExit):
        parse()
    with pytest.raises(SystemExit):
        parse("--arch", "sm_80")
    with pytest.raises(ValueError, match="--jobs: got 0"):
        command.run(parse("--arch", "sm_90a", "--jobs", "0"))


@needs_compiler
def test_command_compiles_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pretend(keys, **options):
        asked.extend(label for label, _ in keys)
        return ()

    monkeypatch.setattr(precompile, "precompile", pretend)
    texts = ("--only", "mhc_seam: flash", "--only", "pro head")
    assert command.run(parse("--arch", "sm_90a", *texts)) == 0
    kinds = ("first", "seam", "seam of experts", "head", "head of streams")
    wanted = [f"sm_90a, mhc_seam: Flash, {kind}" for kind in kinds]
    heads = ["sm_90a, plain_linear: Pro head", "sm_90a, linear_argmax: Pro head"]
    assert sorted(asked) == sorted([*wanted, *heads])
    with pytest.raises(ValueError, match=r"--only: got .*flashier"):
        command.run(parse("--arch", "sm_90a", "--only", "flashier"))


def test_command_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """One row per kernel, failures in full on stderr and in the exit status."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")

    arches = ("sm_90a", "sm_100a")
    released = sum(
        len({op.compile_key(config, arch) for config in op.aot_for(arch).values()})
        for op in registry.OPS.values()
        for arch in arches
        if arch in op.kernels
    )

    def pretend(keys, *, jobs: int, report: bool):
        assert (jobs, report) == (3, True)
        labels = [label for label, _ in keys]
        assert len(labels) == len(set(labels)) == released
        kernel = KernelReport("FmhaKernelSm90", 168, 0, 4, 8, 231000, serialized=True)
        yield Outcome(labels[1], 2.0, error="ValueError: out of tensor memory")
        yield Outcome(labels[0], 1.0, kernels=(kernel,))

    monkeypatch.setattr(precompile, "precompile", pretend)
    arguments = ("--arch", "sm_90a", "--arch", "sm_100a", "--report", "--jobs", "3")
    assert command.run(parse(*arguments)) == 1
    printed = capsys.readouterr()
    assert "FmhaKernelSm90, wgmma serialised" in printed.out
    assert "168" in printed.out and "12 B" in printed.out and "231000 B" in printed.out
    assert f"1 of 2 kernels are in {tmp_path}" in printed.out
    assert (
        "dsv4 compile: sm_90a, sparse_fmha_with_swa: 128 heads, causal: ValueError: out of tensor"
        in printed.err
    )


def test_missing_compiler_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="kernel compiler is missing: pip install"):
        command.run(parse("--arch", "sm_90a"))


@needs_compiler
def test_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that does not exist for these sizes: the child's error, not its traceback."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    key = SPARSE_FMHA.compile_key(FmhaConfig(63, 8, 128, 64), "sm_90a")
    (outcome,) = precompile.precompile([("odd", key)], jobs=1, report=False)
    assert outcome.label == "odd"
    assert outcome.error.startswith("ValueError: head_dim")
    assert "\n" not in outcome.error
    assert not list(tmp_path.rglob("*.o"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/proc/nope", "a file"])
def test_what_was_not_stored_has_failed(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A cache folder that cannot be written: each kernel failed, with the reason; exit status 1."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path / folder))
    label, config = next(iter(STEP_INDICES.aot().items()))
    key = STEP_INDICES.compile_key(config, "sm_90a")
    monkeypatch.setattr(registry, "ahead_of_time", lambda arch: [(label, key)])
    assert command.run(parse("--arch", "sm_90a")) == 1
    printed = capsys.readouterr()
    assert f"0 of 1 kernels are in {tmp_path / folder}" in printed.out
    assert f"dsv4 compile: {label}: NotKept: compiled kernels cannot be kept in" in printed.err
    assert "DSV4_CACHE_DIR" in printed.err


def test_crash_is_reported() -> None:
    """A child that dies without a word still has a reason."""
    killed = subprocess.CompletedProcess([], -9, stdout=b"", stderr=b"")
    assert precompile._reason(killed) == "the compiler ended with status -9"
    aborted = subprocess.CompletedProcess(
        [], -6, stdout=b"", stderr=b"x\nLLVM ERROR: out of memory\n"
    )
    assert precompile._reason(aborted) == "LLVM ERROR: out of memory"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("arch", sorted(SPARSE_FMHA.kernels))
@pytest.mark.parametrize("head_dim", [64, 512])
def test_kernels_compile_without_spills(
    arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real kernels, cross-compiled: in the cache afterwards, no register spilled."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    config = FmhaConfig(head_dim, 64, 128, 512, is_causal=True, sink_mode="softmax")
    key = SPARSE_FMHA.compile_key(config, arch)
    (outcome,) = precompile.precompile([("runner", key)], jobs=1, report=True)
    assert outcome.error == ""
    assert outcome.kernels
    for kernel in outcome.kernels:
        assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), kernel
        assert kernel.shared_memory <= 227 * 1024
    (stored,) = tmp_path.rglob("*.o")
    kernel = SPARSE_FMHA.kernels[arch]
    assert stored.name.startswith(kernel.removeprefix("dsv4.kernels.").replace(".", "-"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("heads", [24, 128])
def test_hopper_products_overlap(
    heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No product waits for one before it, no register is spilled, in any kernel of a runner."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    key = SPARSE_FMHA.compile_key(FmhaConfig(512, heads, 128, 1024, sink_mode="softmax"), "sm_90a")
    (outcome,) = precompile.precompile([("runner", key)], jobs=1, report=True)
    assert outcome.error == ""
    # Many heads: launches without splits have a kernel of their own, and small ones have that for
    # few heads.
    assert len({kernel.entry for kernel in outcome.kernels}) == (1 if heads == 24 else 3)
    for kernel in outcome.kernels:
        assert not kernel.serialized and kernel.spill_stores == 0, kernel
