"""The backends that pass the same tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.testing.attention import Inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of
from dsv4.testing.attention_op import run_op
from dsv4.testing.harness import simulator
from tests.ops.fake_cuda import fake_cuda  # noqa: F401  (a fixture)


@dataclass(frozen=True)
class Backend:
    """Runs the public function on one device, into poisoned outputs."""

    device: str

    def run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """o and lse, on the CPU."""
        o, lse = run_op(inputs.to(self.device))
        return o.cpu(), lse.cpu()


class Simulated:
    """Runs the compiled Blackwell kernel in the simulator, behind the op's own checks."""

    def __init__(self) -> None:
        self.kernels = AttentionKernels(simulator("sm_100a"))

    def run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """o and lse of a launch without split keys, into poisoned outputs."""
        q, lens = inputs.q, inputs.compressed_lens
        o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        config = replace(config_of(inputs), top_k=inputs.compressed_kv.shape[1])
        SPARSE_FMHA.check(config, (*inputs.tensors, o, lens, lse, None))
        if q.shape[0] == 0:
            return o, lse
        outcome = self.kernels.run(self.kernels.compile(config_of(inputs)), inputs)
        return outcome.o, outcome.lse


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("sim", marks=pytest.mark.slow),
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend | Simulated:
    """Every backend of this machine; a missing one is skipped with the reason."""
    if request.param == "sim":
        pytest.importorskip("cutlass", reason="needs the kernel compiler")
        return Simulated()
    return Backend(request.param)
