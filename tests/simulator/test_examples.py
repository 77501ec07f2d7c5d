"""Kernels of others, unmodified, beside their own references or PyTorch.

They are not part of this repository. Each case of scripts/tools/simulator_examples.py runs here if
the environment variable of its source names the folder: DSV4_EXAMPLES_NVIDIA a clone of
github.com/NVIDIA/cutlass, DSV4_EXAMPLES_QUACK where quack is installed, and so on. What passed when
they ran last is on record (tests/recorded/simulator_examples.json).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stage("simulator")

SCRIPT = Path(__file__).parents[2] / "scripts" / "tools" / "simulator_examples.py"


def _script():
    spec = importlib.util.spec_from_file_location("simulator_examples", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


EXAMPLES = _script()
SOURCES = EXAMPLES.sources()
CASES = [(source.name, name) for source in SOURCES.values() for name in source.cases]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "name"), CASES)
def test_outputs_are_right(source, name):
    variable = f"DSV4_EXAMPLES_{source.upper()}"
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no folder")
    outcome = EXAMPLES.run_case(SOURCES[source], Path(folder), name)
    assert outcome.status == EXAMPLES.RIGHT, outcome


def test_every_case_has_its_script():
    for source in SOURCES.values():
        assert source.cases
        for case in source.cases.values():
            assert case.path or (EXAMPLES.CASES / f"{source.name}_cases.py").is_file()
            assert case.arch in ("sm_90a", "sm_100a")


def test_the_page_is_that_of_the_record():
    assert EXAMPLES.PAGE.read_text() == EXAMPLES.page(EXAMPLES.recorded())


@pytest.mark.parametrize(
    ("finding", "stderr", "status", "findings"),
    [
        (None, "", "right", {}),
        ("leak", "", "right", {"leak": 1}),
        ("unsupported instruction", "", "refused", {}),
        ("deadlock", "", "failed", {}),
        (None, "Traceback (most recent call last):\nAssertionError: off", "failed", {}),
    ],
)
def test_outcomes(finding, stderr, status, findings):
    said = {
        "launches": [{"warp_instructions": 5}],
        "findings": [{"kind": finding, "message": "why"}] if finding else [],
        "synchronisation_never_reached": {},
    }
    done = subprocess.CompletedProcess([], 1 if finding or stderr else 0, "", stderr)
    outcome = EXAMPLES._outcome(done, json.loads(json.dumps(said)), 1.0)
    assert (outcome.status, outcome.findings) == (status, findings)
    assert (outcome.warp_instructions, outcome.covered) == (5, True)
