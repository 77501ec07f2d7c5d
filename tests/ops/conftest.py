"""The backends that pass the same tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops import sparse_fmha_with_swa
from dsv4.ops.attention import checks
from dsv4.ops.runtime import registry
from tests.attention_cases import Inputs

SIMULATED_MULTIPROCESSORS = 148  # of a B200


@dataclass(frozen=True)
class Backend:
    """Runs the public function on one device, into poisoned outputs."""

    device: str

    def run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """o and lse, on the CPU."""
        there = inputs.to(self.device)
        out = torch.full_like(there.tensors[0], torch.nan)
        o, lse = sparse_fmha_with_swa(*there.tensors, **there.options, out=out, return_lse=True)
        assert o is out
        return o.cpu(), lse.cpu()


@dataclass
class Simulator:
    """Runs the compiled Blackwell kernel on the CPU, behind the op's own checks."""

    folder: Path
    compiled: dict = field(default_factory=dict)

    def run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """o and lse of a launch without split keys, into poisoned outputs."""
        from dsv4.simulator import simulate

        q, compressed_kv = inputs.tensors[:2]
        options = dict(inputs.options)
        lens = options.pop("compressed_lens")
        window = options.pop("sliding_window")
        config = FmhaConfig(q.shape[2], q.shape[1], window, compressed_kv.shape[1], **options)
        o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        checks.check_arguments(config, *inputs.tensors, o, lens, lse, None)
        if q.shape[0] == 0:
            return o, lse
        absent = torch.empty(0, dtype=torch.int32)
        report = simulate(
            self._compile(config),
            *inputs.tensors,
            o,
            absent if lens is None else lens,
            lse,
            torch.empty(0),
            1,
            SIMULATED_MULTIPROCESSORS,
        )
        report.raise_if_racy()
        return o, lse

    def _compile(self, config: FmhaConfig):
        key = registry.runner_key(config, "sm_100a")
        if key not in self.compiled:
            options = f"--gpu-arch sm_100a --keep-ptx --generate-line-info --dump-dir {self.folder}"
            self.compiled[key] = registry.build(key, options)
        return self.compiled[key]


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("sim", marks=pytest.mark.slow),
    ],
)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Backend | Simulator:
    """Every backend of this machine; a missing one is skipped with the reason."""
    if request.param == "sim":
        pytest.importorskip("cutlass", reason="needs the kernel compiler")
        return Simulator(tmp_path_factory.mktemp("ptx"))
    return Backend(request.param)
