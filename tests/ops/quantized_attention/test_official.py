"""Parity with SageAttention's own Triton code, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = "SAGEATTENTION_SOURCE"
pytestmark = [pytest.mark.stage("lowp"), pytest.mark.slow]


@pytest.mark.parametrize("what", ["qk", "kernel"])
def test_the_official_code_gives_the_same(what) -> None:
    """Codes and scales of the quantisers without a difference; outputs and lse within rounding."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install 'triton>=3.9'")
    if SOURCE not in os.environ:
        pytest.skip(
            f"needs {SOURCE}, a clone of SageAttention; scripts/sage_parity has the command"
        )
    command = [sys.executable, "scripts/sage_parity", "--source", os.environ[SOURCE], what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") >= 4
