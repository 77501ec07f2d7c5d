"""The kernels under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.stage("H")]

SCRIPT = """
import torch
from tests.gpu.attention_cases import Case
torch.manual_seed(0)
case = Case.random(3, 72, {head_dim}, 150, 70, 2, ragged=True, padding=1)
for num_splits in (1, 3):
    case.check(sink_mode="softmax", num_splits=num_splits)
"""


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool, head_dim) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    done = subprocess.run(
        [
            *(sanitizer, "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, "-c", SCRIPT.format(head_dim=head_dim)),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
