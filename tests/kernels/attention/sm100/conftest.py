"""The Blackwell kernels, compiled for sm_100a: simulated, or on a B200 where there is one."""

from __future__ import annotations

import pytest

from dsv4.testing.attention_kernel import AttentionKernels
from dsv4.testing.harness import Device, simulator


@pytest.fixture(scope="session", params=["sim", pytest.param("cuda", marks=pytest.mark.sm100)])
def backend(request: pytest.FixtureRequest) -> AttentionKernels:
    """Both targets need the kernel compiler."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return AttentionKernels(Device() if request.param == "cuda" else simulator("sm_100a"))
