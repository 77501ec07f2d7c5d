"""The tests themselves, on a machine without the kernel compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stage("simulator")

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = "import sys, pytest; sys.modules['cutlass'] = None; sys.exit(pytest.main(sys.argv[1:]))"


def test_files_that_need_the_compiler_are_skipped():
    files = ["tests/simulator/test_gemm.py", "tests/simulator/timing/test_units.py"]
    command = [sys.executable, "-c", HIDDEN, *files, "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "needs the kernel compiler nvidia-cutlass-dsl" in done.stdout, done.stdout
    assert "error" not in done.stdout.lower(), done.stdout
    assert "test_gemm.py" in done.stdout
