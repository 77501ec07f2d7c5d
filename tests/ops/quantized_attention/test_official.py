"""Parity with SageAttention's own code: with digests of what its Triton and CUDA quantisers gave,
and, where they are there, with its Triton code itself, run by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.testing.official_codes import cases, digest

ROOT = Path(__file__).parents[3]
SOURCE = "SAGEATTENTION_SOURCE"
pytestmark = pytest.mark.stage("lowp")
DIGESTS = json.loads(Path(__file__).with_name("official_codes.json").read_text())["digests"]


def test_every_case_has_a_digest() -> None:
    assert sorted(map(str, cases())) == sorted(DIGESTS)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_codes_and_scales_are_the_official_ones(case) -> None:
    """Every byte; IEEE divides on both sides."""
    assert digest(case.found()) == DIGESTS[str(case)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["qk", "kernel"])
def test_the_official_code_gives_the_same(what) -> None:
    """Codes and scales of the quantisers without a difference; outputs and lse within rounding."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install 'dsv4[parity]'")
    if SOURCE not in os.environ:
        pytest.skip(
            f"needs {SOURCE}, a clone of SageAttention; scripts/sage_parity has the command"
        )
    command = [sys.executable, "scripts/sage_parity", "--source", os.environ[SOURCE], what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") >= 4
