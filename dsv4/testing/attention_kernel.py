"""Calls of the compiled attention kernels: what a target needs to run `Inputs` on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.launch_plan import workspace_size
from dsv4.kernels.attention.split_kv import counter_words
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.harness import Call, Outcome, Target, run_all
from dsv4.testing.kernel_call import OpKernels, make_call

LEAST_WORKSPACE = 4  # elements; a launch without splits does not look at them


def config_of(case: Case | Inputs, num_splits: int | None = None) -> FmhaConfig:
    """What a case compiles; sizes that the kernel takes at run time are left out."""
    is_case = isinstance(case, Case)
    heads, head_dim = (case.heads, case.head_dim) if is_case else case.size[1:]
    return FmhaConfig(
        head_dim=head_dim,
        num_query_heads=heads,
        sliding_window=case.sliding_window if case.is_causal else 0,
        top_k=1024,
        is_causal=case.is_causal,
        sink_mode=case.sink_mode,
        softmax_scale=case.softmax_scale,
        num_splits=num_splits,
    )


def new_workspace(
    arch: str, config: FmhaConfig, tokens: int, splits: int, device: str = "cpu"
) -> Tensor:
    """The workspace of a launch as it is when new: counters of 0 where the kernel has some, NaN in
    the place of partial rows."""
    size = workspace_size(config, tokens, splits) if splits > 1 else LEAST_WORKSPACE
    workspace = torch.full((size,), torch.nan, device=device)
    if has_counters(arch):
        workspace[: counter_words(size)] = 0
    return workspace


def has_counters(arch: str) -> bool:
    """Whether the splits of a token meet in the workspace; else a second launch combines them."""
    return arch == "sm_90a"


def attention_call(
    arch: str,
    inputs: Inputs,
    splits: int,
    ctas: int,
    workspace: Tensor | None = None,
    o: Tensor | None = None,
) -> Call:
    """Arguments of a compiled attention kernel, on the device of the inputs.

    Args:
        splits: CTAs, or pairs of them, that share the keys of a token and its heads.
        ctas: that are said to run at a time; with fewer than work items each takes several.
        workspace, o: instead of new ones.
    """
    config = config_of(inputs)
    if workspace is None:
        workspace = new_workspace(arch, config, inputs.size[0], splits, inputs.q.device)
    return make_call(
        SPARSE_FMHA.args,
        SPARSE_FMHA.values(config),
        {**inputs.arguments, "o": o, "workspace": workspace},
        {"num_splits": splits, "num_ctas": ctas},
        wanted=("lse",),
    )


class AttentionOutcome(Outcome):
    """Outputs of the attention kernel."""

    @property
    def o(self) -> Tensor:
        """[T, n_h, head_dim]."""
        return self["o"]

    @property
    def lse(self) -> Tensor:
        """[T, n_h]."""
        return self["lse"]

    @property
    def workspace(self) -> Tensor:
        """What the launch left of its splits."""
        return self.scratch["workspace"]


class AttentionKernels(OpKernels):
    """The attention kernels of a target's architecture.

    Args:
        target: where they are compiled for and run.
        ctas: that are said to run at a time by default: as many as the target has SMs.
    """

    def __init__(self, target: Target, ctas: int | None = None) -> None:
        super().__init__(SPARSE_FMHA, target)
        self.ctas = target.multiprocessors if ctas is None else ctas

    @property
    def device(self) -> str:
        return self.target.device

    @property
    def schedules(self) -> tuple[str, ...]:
        return self.target.schedules

    def call(
        self,
        inputs: Inputs,
        splits: int = 1,
        ctas: int | None = None,
        workspace: Tensor | None = None,
        o: Tensor | None = None,
    ) -> Call:
        """See `attention_call`; inputs elsewhere are copied to the target's device."""
        there = inputs if inputs.q.device.type == self.device else inputs.to(self.device)
        ctas = self.ctas if ctas is None else ctas
        return attention_call(self.target.arch, there, splits, ctas, workspace, o)

    def run(
        self,
        kernel: Any,
        inputs: Inputs,
        splits: int = 1,
        schedule: str | None = None,
        seed: int = 0,
        *,
        races: bool = True,
        ctas: int | None = None,
        workspace: Tensor | None = None,
        o: Tensor | None = None,
    ) -> AttentionOutcome:
        """Launch a compiled kernel into poisoned outputs."""
        call = self.call(inputs, splits, ctas, workspace, o)
        schedule = self.schedules[0] if schedule is None else schedule
        outcome = self.target.run(kernel, call, schedule, seed, races)
        return AttentionOutcome(outcome.outputs, outcome.scratch, outcome.report)

    def run_all(
        self,
        kernel: Any,
        inputs: Inputs,
        splits: int = 1,
        seed: int = 0,
        ctas: int | None = None,
        schedules: Sequence[str] | None = None,
    ) -> AttentionOutcome:
        """Launch in every schedule; the results must agree bit for bit."""
        outcome = run_all(
            self.target, kernel, lambda: self.call(inputs, splits, ctas), seed, schedules
        )
        return AttentionOutcome(outcome.outputs, outcome.scratch, outcome.report)

    def check(
        self,
        case: Case | Inputs,
        seed: int,
        splits: int = 1,
        ctas: int | None = None,
        **options: Any,
    ) -> AttentionOutcome:
        """Run a case, or inputs, in every schedule and compare it with the oracle."""
        inputs = make_inputs(case, seed) if isinstance(case, Case) else case
        kernel = self.compile(config_of(case))
        outcome = self.run_all(kernel, inputs, splits, seed, ctas, **options)
        assert_right(outcome, inputs)
        return outcome


def assert_right(outcome: AttentionOutcome, inputs: Inputs) -> None:
    """Compare o and lse with the oracle."""
    expected_o, expected_lse = inputs.expected()
    assert_attention_close(outcome.o, expected_o, outcome.lse, expected_lse)
