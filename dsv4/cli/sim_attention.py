"""`dsv4 sim attention`: one call of the compiled kernel, simulated and checked."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import counter_words
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime.registry import build
from dsv4.ops.runtime.report import REMARKS, KernelReport, kernel_reports
from dsv4.simulator.api import MULTIPROCESSORS
from dsv4.testing.accuracy import BFLOAT16, Accuracy
from dsv4.testing.attention import LSE_BOUND, Case, Inputs, lse_error, make_inputs
from dsv4.testing.attention_kernel import attention_call, config_of, has_counters
from dsv4.testing.harness import Call, compiler_options

FEW_CTAS = 4  # fewer than there is work for: each goes on to more
SOME_CTAS = 24  # more than there is work for, too few for two that share a head tile's columns


class Launch(NamedTuple):
    """Splits, CTAs that run at a time (None: one on every SM), and whether windows are all keys."""

    splits: int
    ctas: int | None = None
    is_window_only: bool = False


# Of mixed requests: with room for the next launch's CTAs, of windows alone and of all keys; without
# splits, with two, and with more of them than some tokens have keys.
MIXED = (
    Launch(1, SOME_CTAS, is_window_only=True),
    Launch(1, SOME_CTAS),
    *(Launch(splits, ctas) for splits in (1, 2, 9) for ctas in (FEW_CTAS, None)),
)


@dataclass(frozen=True)
class Workload:
    """A case on an architecture.

    Attributes:
        arch: sm_100a or sm_90a.
        num_splits: CTAs that share a token's keys; None leaves the choice to the package.
        is_mixed: not one step of a model, but what reaches every synchronisation of the kernel.
    """

    arch: str
    case: Case
    num_splits: int | None = None
    is_mixed: bool = False

    @classmethod
    def mixed(
        cls, arch: str, heads: int, head_dim: int, top_k: int, num_splits: int | None = None
    ) -> Workload:
        """Causal windows, requests of several tokens, padding, ragged lengths and growing maxima,
        in launches of several numbers of splits and of CTAs."""
        case = Case(
            heads=heads,
            head_dim=head_dim,
            top_k=top_k,
            requests=((-1, 1), (0, 2), (-1, 1), (1, 1), (2, 2)),
            sink_mode="swa_gate",
            is_causal=True,
            growing=True,
        )
        return cls(arch, case, num_splits, is_mixed=True)

    @property
    def config(self) -> FmhaConfig:
        """What the kernel is compiled for; ValueError for sizes that no kernel takes."""
        return config_of(self.case)

    @property
    def splits(self) -> int:
        """KV splits of the launch."""
        if self.num_splits is not None:
            return self.num_splits
        case = self.case
        size = (case.tokens, case.top_k, case.window_rows, MULTIPROCESSORS[self.arch])
        return launch_plan.num_splits(self.config, *size, self.arch)

    @property
    def launches(self) -> Sequence[Launch]:
        """The launches that are made."""
        if self.is_mixed and self.num_splits is None:
            return MIXED
        return [Launch(self.splits, FEW_CTAS if self.is_mixed else None)]

    def inputs(self, seed: int) -> Inputs:
        """Unit-scale random inputs."""
        return make_inputs(self.case, seed)

    def call(self, inputs: Inputs, splits: int | None = None, ctas: int | None = None) -> Call:
        """Arguments of the compiled kernel; by default those of a decode step."""
        splits = self.splits if splits is None else splits
        ctas = MULTIPROCESSORS[self.arch] if ctas is None else ctas
        return attention_call(self.arch, inputs, splits, ctas)

    def __str__(self) -> str:
        case = self.case
        return (
            f"T={case.tokens}, {case.heads} heads, {case.top_k} + {case.window_rows} keys, "
            f"head_dim {case.head_dim}, {self.splits} splits, {self.arch}"
            + (", mixed requests" if self.is_mixed else "")
        )


@dataclass(frozen=True)
class Verdict:
    """o and lse of a call against the FP32 oracle."""

    o: Accuracy
    lse: float  # largest absolute difference

    @classmethod
    def of(cls, call: Call, inputs: Inputs) -> Verdict:
        """Compare the outputs of a call that has run."""
        expected_o, expected_lse = inputs.expected()
        return cls(
            Accuracy.of(call.outputs["o"], expected_o),
            lse_error(call.outputs["lse"], expected_lse),
        )

    @classmethod
    def worst(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """One that is wrong, if there is one; else the one that is off most."""
        return max(verdicts, key=lambda verdict: (not verdict.correct, verdict.o.relative))

    @property
    def correct(self) -> bool:
        """Within the package's bounds; NaN is not."""
        return not self.o.faults(BFLOAT16) and self.lse <= LSE_BOUND


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled host function and what the compiler said about its kernels."""

    function: Any
    reports: tuple[KernelReport, ...]
    tmem_columns: int  # of the attention kernel; 0 where there is no TMEM

    def report_of(self, entry: str) -> KernelReport | None:
        """What the compiler said about an entry; None where it said nothing."""
        return next((report for report in self.reports if report.entry == entry), None)

    def name_of(self, entry: str) -> str:
        """The class an entry is compiled from, or the entry itself."""
        said = self.report_of(entry)
        return said.name if said else entry


def compile_attention(workload: Workload, has_lines: bool = True) -> CompiledKernel:
    """Compile the kernel of a workload, with its PTX kept for the simulator, and the Python lines
    that findings and timelines name."""
    # A wrong size is an error before the compiler starts.
    key = SPARSE_FMHA.compile_key(workload.config, workload.arch)
    with _captured_stderr() as remarks:
        function = build(key, f"{compiler_options(workload.arch, has_lines)} {REMARKS}")
        sys.stderr.flush()
    # Without the compiler's IR the reports lack shared memory: launches know that themselves.
    reports = tuple(kernel_reports(remarks.read_text(), ir=""))
    remarks.unlink()
    return CompiledKernel(function, reports, _tmem_columns(workload))


def _tmem_columns(workload: Workload) -> int:
    if workload.arch != "sm_100a":
        return 0
    from dsv4.kernels.attention.sm100.plan_1cta import Plan1Cta

    return Plan1Cta(workload.case.head_dim).tmem.allocated_columns


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


def make_timing_call(workload: Workload, seed: int) -> Call:
    """A decode step for the time model: every token has the same rows, so that any number of them
    fits the machine. They count as distinct bytes."""
    case = workload.case
    one = make_inputs(replace(case, requests=((0, 1),), batch=1), seed)
    tokens = case.tokens
    repeated = {
        name: getattr(one, name).expand(tokens, -1, -1) for name in ("q", "compressed_kv", "swa_kv")
    }
    call = workload.call(
        one.replaced(
            **repeated,
            swa_lens=one.swa_lens.repeat(tokens),
            request_ids=torch.arange(tokens, dtype=torch.int32),
        )
    )
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
    return has_counters(workload.arch) and workload.splits > 1
