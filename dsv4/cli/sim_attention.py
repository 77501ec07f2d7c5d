"""What `dsv4 sim attention` runs: one call of the compiled kernel, simulated and checked."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import counter_words
from dsv4.ops.attention import splits as fmha_splits
from dsv4.ops.runtime.report import REMARKS, KernelReport, kernel_reports
from dsv4.reference.attention import sparse_fmha_with_swa

MULTIPROCESSORS = {"sm_100a": 148, "sm_90a": 132}
SINK_MODE = "softmax"

# What counts as equal to the FP32 oracle, for bf16 inputs of unit scale.
MAX_RELATIVE, MIN_COSINE, MAX_ELEMENT, MAX_LSE = 4e-3, 0.99999, 5e-3, 1e-4


@dataclass(frozen=True)
class Workload:
    """`tokens` requests that decode one token each, over full windows.

    Attributes:
        arch: sm_100a or sm_90a.
        top_k, window: compressed rows and window rows per token.
        num_splits: CTAs that share a token's keys; None leaves the choice to the package.
    """

    arch: str
    heads: int
    top_k: int
    tokens: int = 1
    head_dim: int = 512
    window: int = 128
    num_splits: int | None = None

    @property
    def config(self) -> FmhaConfig:
        """What the kernel is compiled for; ValueError for sizes that no kernel takes."""
        return FmhaConfig(self.head_dim, self.heads, self.window, self.top_k, sink_mode=SINK_MODE)

    @property
    def splits(self) -> int:
        """KV splits of the launch."""
        if self.num_splits is not None:
            return self.num_splits
        size = (self.tokens, self.top_k, self.window, MULTIPROCESSORS[self.arch])
        return fmha_splits.choose(self.config, *size, self.arch)

    @property
    def flops(self) -> int:
        """Operations of both matrix products."""
        return 4 * self.tokens * self.heads * (self.top_k + self.window) * self.head_dim

    @property
    def bytes(self) -> int:
        """Compulsory traffic: KV and q read once, o written once."""
        return 2 * self.tokens * self.head_dim * (self.top_k + self.window + 2 * self.heads)

    def __str__(self) -> str:
        return (
            f"T={self.tokens}, {self.heads} heads, {self.top_k} + {self.window} keys, "
            f"head_dim {self.head_dim}, {self.splits} splits, {self.arch}"
        )


@dataclass(frozen=True)
class Call:
    """Arguments of the compiled function: `tensors` in order, `options` by name."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]

    @property
    def output(self) -> Tensor:
        """o [T, n_h, head_dim], bf16."""
        return self.tensors[-1]


@dataclass(frozen=True)
class Accuracy:
    """The kernel's output against the FP32 oracle."""

    relative: float  # Frobenius norm of the difference over that of the oracle
    cosine: float
    element: float  # largest |difference| over 1 + |oracle|
    lse: float  # largest absolute difference

    @property
    def correct(self) -> bool:
        """Within the package's bounds; NaN is not."""
        return (
            self.relative <= MAX_RELATIVE
            and self.cosine >= MIN_COSINE
            and self.element <= MAX_ELEMENT
            and self.lse <= MAX_LSE
        )


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled host function and what the compiler said about its kernels."""

    function: Any
    reports: tuple[KernelReport, ...]
    tmem_columns: int  # of the attention kernel; 0 where there is no TMEM


def compile_attention(workload: Workload) -> CompiledKernel:
    """Compile the kernel of a workload, with its PTX kept for the simulator."""
    config = workload.config  # a wrong size is an error before the compiler starts
    with tempfile.TemporaryDirectory() as dump:
        folder = workload.arch.removesuffix("a").replace("_", "")
        module = importlib.import_module(f"dsv4.kernels.attention.{folder}.fmha")
        options = f"--gpu-arch {workload.arch} --keep-ptx --generate-line-info --dump-dir {dump}"
        with _captured_stderr() as remarks:
            function = module.build(config, f"{options} {REMARKS}")
            sys.stderr.flush()
        # Without the compiler's IR the reports lack shared memory: launches know that themselves.
        reports = tuple(kernel_reports(remarks.read_text(), ir=""))
        remarks.unlink()
    return CompiledKernel(function, reports, _tmem_columns(workload))


def _tmem_columns(workload: Workload) -> int:
    if workload.arch != "sm_100a":
        return 0
    from dsv4.kernels.attention.sm100.plan_1cta import Plan1Cta

    return Plan1Cta(workload.head_dim).tmem.allocated_columns


@contextmanager
def _captured_stderr() -> Iterator[Path]:
    """Send what the compiler prints to stderr, from Python and from native code, to a file; the
    caller deletes it."""
    sys.stderr.flush()
    descriptor, name = tempfile.mkstemp(suffix=".txt")
    path, saved = Path(name), os.dup(2)
    os.dup2(descriptor, 2)
    try:
        with open(descriptor, "w") as stream, redirect_stderr(stream):
            yield path
    except BaseException:
        path.unlink()
        raise
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def make_call(workload: Workload, seed: int) -> Call:
    """Unit-scale random inputs and poisoned outputs of a workload."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tokens, heads, dim = workload.tokens, workload.heads, workload.head_dim
    return _call(
        workload,
        normal(tokens, heads, dim),
        normal(tokens, workload.top_k, dim),
        normal(tokens, workload.window, dim),
        torch.randn(heads, generator=generator),
    )


def make_timing_call(workload: Workload, seed: int) -> Call:
    """A call for the time model: every token has the same rows, so that any number of them fits
    the machine. They count as distinct bytes."""
    one = make_call(replace(workload, tokens=1, num_splits=1), seed)
    q, compressed, window, _, sinks, _, _ = one.tensors
    repeated = [x.expand(workload.tokens, -1, -1) for x in (q, compressed, window)]
    call = _call(workload, *repeated, sinks)
    let_others_arrive(workload, call)
    return call


def let_others_arrive(workload: Workload, call: Call) -> None:
    """Make the workspace look as if all splits but one had arrived: that one need not wait."""
    if waits_for_splits(workload):
        workspace = call.options["workspace"]
        # One more arrival completes a group, whichever split it is of.
        workspace[: counter_words(len(workspace))].view(torch.int64).fill_((2**31 - 1) << 32)


def timed_clusters(workload: Workload) -> Callable[[int], Sequence[int]]:
    """Which clusters of a launch the time model records: one that waits for others runs alone."""
    from dsv4.simulator.timing.prediction import some_clusters

    # The first split has as many keys as any.
    return (lambda count: [0]) if waits_for_splits(workload) else some_clusters


def waits_for_splits(workload: Workload) -> bool:
    """Whether CTAs that share a token wait for each other, instead of leaving the rest to a second
    launch."""
    return workload.arch == "sm_90a" and workload.splits > 1


def _call(workload: Workload, q: Tensor, compressed: Tensor, window: Tensor, sinks: Tensor) -> Call:
    tokens, heads = workload.tokens, workload.heads
    splits = workload.splits
    partials = 0
    if splits > 1:
        partials = fmha_splits.workspace_size(workload.config, tokens, splits)
    tensors = (
        q,
        compressed,
        window,
        torch.full((tokens,), workload.window, dtype=torch.int32),
        sinks,
        torch.arange(tokens, dtype=torch.int32),
        torch.full(q.shape, torch.nan, dtype=q.dtype),
    )
    options = {
        "compressed_lens": torch.empty(0, dtype=torch.int32),
        "lse": torch.full((tokens, heads), torch.nan),
        "workspace": torch.zeros(max(partials, 4)),
        "num_splits": splits,
        "num_ctas": MULTIPROCESSORS[workload.arch],
    }
    return Call(tensors, options)


def check(call: Call) -> Accuracy:
    """Compare the outputs of a call that has run with the oracle on the same inputs."""
    inputs = [x.float() if x.is_floating_point() else x for x in call.tensors[:-1]]
    expected_o, expected_lse = sparse_fmha_with_swa(*inputs, sink_mode=SINK_MODE)
    actual, expected = call.output.double(), expected_o.double()
    difference = actual - expected
    return Accuracy(
        relative=(difference.norm() / expected.norm()).item(),
        cosine=torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0).item(),
        element=(difference.abs() / (1 + expected.abs())).max().item(),
        lse=(call.options["lse"].double() - expected_lse.double()).abs().max().item(),
    )
