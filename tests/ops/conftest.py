"""The backends that pass the same tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.ops import sparse_fmha_with_swa
from tests.attention_cases import Inputs


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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend of this machine; a missing one is skipped with the reason."""
    return Backend(request.param)
