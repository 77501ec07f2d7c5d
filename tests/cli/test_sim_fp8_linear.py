"""`dsv4 sim fp8_linear`: every tiling, and what synchronisation was not reached."""

from __future__ import annotations

import pytest

from dsv4.cli.main import main

pytestmark = [pytest.mark.stage("projections"), pytest.mark.slow]


@pytest.mark.parametrize(("rows", "status"), [(392, 0), (72, 2)])
def test_every_tiling_is_simulated(rows, status, capsys) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    assert main(["sim", "fp8_linear", "--rows", f"{rows}"]) == status
    said = capsys.readouterr().out
    assert said.count("equal bits, no race") == 12
    assert ("synchronisation never reached" in said) == bool(status)
