"""NVIDIA's CuTeDSL examples, unmodified, against their own references in PyTorch.

The examples are not part of this repository. With DSV4_CUTLASS naming a clone of
github.com/NVIDIA/cutlass, each case of scripts/tools/simulator_examples.py runs here.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stage("simulator"), pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "scripts" / "tools" / "simulator_examples.py"
CUTLASS = os.environ.get("DSV4_CUTLASS", "")
SECONDS = 1800


def _script():
    spec = importlib.util.spec_from_file_location("simulator_examples", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


EXAMPLES = _script()


@pytest.mark.skipif(not CUTLASS, reason="DSV4_CUTLASS names no clone of github.com/NVIDIA/cutlass")
@pytest.mark.parametrize("name", EXAMPLES.CASES)
def test_example_matches_its_reference(name):
    passed, text = EXAMPLES.run_case(Path(CUTLASS), EXAMPLES.CASES[name], [], SECONDS)
    assert passed, text
