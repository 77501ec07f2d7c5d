"""Targets that FP8 linears run on."""

from __future__ import annotations

import pytest

from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.testing.harness import Device, simulator
from dsv4.testing.kernel_call import OpKernels


@pytest.fixture(
    scope="module",
    params=[
        "sm_90a",
        pytest.param("sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.sm90]),
    ],
)
def kernels(request: pytest.FixtureRequest) -> OpKernels:
    """Kernels of `fp8_linear`."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return OpKernels(FP8_LINEAR, Device() if request.param == "cuda" else simulator(request.param))
