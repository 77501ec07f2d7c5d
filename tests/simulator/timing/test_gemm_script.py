"""`scripts/tools/simulator_gemm_times.py` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.timing.gemm_cases import MEASURED

pytestmark = pytest.mark.stage("simulator")
SCRIPT = Path(__file__).parents[3] / "scripts" / "tools" / "simulator_gemm_times.py"


def test_table_says_model_and_sums_up(tmp_path):
    listed = json.loads(MEASURED.read_text())
    listed["results"] = [r for r in listed["results"] if r["m"] == 1024][:2]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(listed))
    done = subprocess.run(
        [sys.executable, SCRIPT, "--measured", path], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("H200 model") and "model us" in lines[1]
    assert [line.split(" | ")[1] for line in lines[3:5]] == ["1024", "1024"]
    assert lines[-1].startswith("model against measurement") and "of 2 GEMMs" in lines[-1]
