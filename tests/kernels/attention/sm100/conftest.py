"""Where the stages of the Blackwell kernel run: compiled for sm_100a, simulated or on the GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention.splits import workspace_size as workspace_elements
from dsv4.simulator import Report, simulate
from dsv4.simulator.tensor_races import MISSING_FENCE
from tests.accuracy import assert_attention_close
from tests.attention_cases import Case, Inputs, make_inputs

SCHEDULES = ("eager", "lazy", "random")
MULTIPROCESSORS = 148  # of a B200
NEEDS_COMPILER = "compiles kernels: needs CuTeDSL"


@dataclass(frozen=True)
class Result:
    """What one launch wrote, on the CPU; `report` is the simulator's."""

    o: Tensor
    lse: Tensor
    workspace: Tensor
    report: Report | None


@dataclass
class Backend:
    """Compiles kernels once and runs them into poisoned outputs."""

    device: str
    options: str
    compiled: dict = field(default_factory=dict)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Orders in which asynchronous work may complete; a GPU has its own."""
        return SCHEDULES if self.device == "cpu" else ("hardware",)

    def compile(self, config: FmhaConfig, build: Callable | None = None):
        """The kernel that `build` makes of `config`; by default the product's."""
        if build is None:
            build = importlib.import_module("dsv4.kernels.attention.sm100.fmha").build
        key = (build, config)
        if key not in self.compiled:
            self.compiled[key] = build(config, self.options)
        return self.compiled[key]

    def run(
        self,
        kernel,
        inputs: Inputs,
        splits: int = 1,
        schedule: str = "eager",
        seed: int = 0,
        workspace_size: int | None = None,
        o: Tensor | None = None,
        ctas: int = MULTIPROCESSORS,
    ) -> Result:
        """Launch a compiled kernel; by default with the workspace that `splits` needs.

        `ctas` are said to run at a time: with fewer, persistent ones take several items each.
        """
        there = inputs.to(self.device)
        q, lens = there.tensors[0], there.options["compressed_lens"]
        tokens, heads, head_dim = q.shape
        if workspace_size is None:
            config = FmhaConfig(head_dim, heads, 0, 0)
            workspace_size = max(4, workspace_elements(config, tokens, splits))
        o = torch.full_like(q, torch.nan) if o is None else o
        lse, workspace = (
            torch.full(shape, torch.nan, device=self.device)
            for shape in ((tokens, heads), (workspace_size,))
        )
        if lens is None:
            lens = torch.empty(0, dtype=torch.int32, device=self.device)
        options = {"compressed_lens": lens, "lse": lse, "workspace": workspace}
        options |= {"num_splits": splits, "num_ctas": ctas}
        report = None
        if self.device == "cpu":
            arguments = (*there.tensors, o)
            report = simulate(kernel, *arguments, **options, schedule=schedule, seed=seed)
            report.raise_if_racy()
            # Not a race by the order of barriers, but PTX promises tcgen05 no order without fences.
            unfenced = [str(found) for found in report.warnings if found.kind == MISSING_FENCE]
            assert not unfenced, "\n".join(unfenced)
        else:
            kernel(*there.tensors, o, **options)
        return Result(o.cpu(), lse.cpu(), workspace.cpu(), report)

    def run_all(
        self, kernel, inputs: Inputs, splits: int = 1, seed: int = 0, ctas: int = MULTIPROCESSORS
    ) -> Result:
        """Launch in every schedule; the results must agree bit for bit."""
        results = [
            self.run(kernel, inputs, splits, name, seed, ctas=ctas) for name in self.schedules
        ]
        for name, result in zip(self.schedules, results):
            for what in ("o", "lse"):
                first, other = getattr(results[0], what), getattr(result, what)
                same = torch.equal(first.nan_to_num(), other.nan_to_num())
                assert same, f"{what} depends on the schedule: {self.schedules[0]}, {name}"
        return results[-1]

    def check(self, case: Case, seed: int, splits: int = 1, ctas: int = MULTIPROCESSORS) -> Result:
        """Run a case in every schedule and compare it with the oracle."""
        inputs = make_inputs(case, seed)
        result = self.run_all(self.compile(config_of(case)), inputs, splits, seed, ctas)
        expected_o, expected_lse = inputs.expected()
        assert_attention_close(result.o, expected_o, result.lse, expected_lse)
        return result


def config_of(case: Case) -> FmhaConfig:
    """What a case compiles; sizes that the kernel takes at run time are left out."""
    return FmhaConfig(
        head_dim=case.head_dim,
        num_query_heads=case.heads,
        sliding_window=case.sliding_window if case.is_causal else 0,
        top_k=1024,
        is_causal=case.is_causal,
        sink_mode=case.sink_mode,
        softmax_scale=case.softmax_scale,
    )


@pytest.fixture(scope="session", params=["sim", pytest.param("cuda", marks=pytest.mark.sm100)])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The simulator, and a B200 where there is one; both need the kernel compiler."""
    pytest.importorskip("cutlass", reason=NEEDS_COMPILER)
    if request.param == "cuda":
        return Backend("cuda", "")
    dump = tmp_path_factory.mktemp("ptx")
    return Backend("cpu", simulator_options(dump))


def simulator_options(dump: Path) -> str:
    """Compiler options that the simulator needs; PTX files go to `dump`."""
    return f"--gpu-arch sm_100a --keep-ptx --generate-line-info --dump-dir {dump}"
