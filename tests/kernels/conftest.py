"""Target of kernels that both architectures share."""

from __future__ import annotations

import pytest

from dsv4.testing.harness import Device, Target, simulator


@pytest.fixture(
    scope="module",
    params=[
        "sm_90a",
        # The same kernel: a listed command of `dsv4 sim` runs it, and is not slow.
        pytest.param("sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def target(request: pytest.FixtureRequest) -> Target:
    """The simulator of an architecture, or this machine's GPU."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else simulator(request.param)
