"""`dsv4 sim fp8_linear`: every tiling, and what synchronisation was not reached."""

from __future__ import annotations

import pytest

from dsv4.cli.main import main

pytestmark = [pytest.mark.stage("projections"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("arch", "rows", "launches", "status"),
    [("sm_90a", 392, 18, 0), ("sm_90a", 72, 18, 2), ("sm_100a", 392, 15, 0)],
)
def test_every_tiling_is_simulated(arch, rows, launches, status, capsys) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    assert main(["sim", "fp8_linear", "--arch", arch, "--rows", f"{rows}"]) == status
    said = capsys.readouterr().out
    assert said.count("equal bits, no race") == launches
    assert ("synchronisation never reached" in said) == bool(status)
