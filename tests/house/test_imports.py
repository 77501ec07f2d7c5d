"""What importing the package may and may not do, and which way its layers depend."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("cutlass", "transformers", "tvm_ffi", "matplotlib", "triton")


# One fresh interpreter for all statements, one after the other: each of its own loads torch anew.
STATEMENTS = ("import dsv4", "import dsv4.ops, dsv4.model.model")
SCRIPT = """
import json, sys
found = {}
for statement in sys.argv[1:]:
    exec(statement)
    found[statement] = sorted({name.split(".")[0] for name in sys.modules})
import torch
print(json.dumps([found, torch.cuda.is_initialized()]))
"""


@functools.cache
def after_imports() -> tuple[dict[str, list[str]], bool]:
    """Top-level modules after each statement, and whether CUDA is initialised in the end."""
    command = [sys.executable, "-c", SCRIPT, *STATEMENTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found, has_cuda = json.loads(done.stdout)
    return found, has_cuda


@pytest.mark.parametrize("statement", STATEMENTS)
def test_import_is_light(statement: str) -> None:
    """A kernel compiler at import would cost seconds and break machines without CUDA libraries."""
    modules = after_imports()[0][statement]
    assert "torch" in modules and set(modules).isdisjoint(HEAVY)


def test_command_line_starts_without_torch() -> None:
    """`dsv4 --help` and completion stay instant: subcommands import on use."""
    command = [sys.executable, "-X", "importtime", "-m", "dsv4", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "dsv4.cli.main" in loaded
    assert "torch" not in loaded


def test_cuda_is_not_initialised_by_import() -> None:
    """An import that creates a CUDA context breaks forked workers and takes GPU memory."""
    assert not after_imports()[1]


def test_layers_depend_one_way() -> None:
    """The contracts of pyproject.toml: kernels <- ops <- ... <- model <- engine, and sidecars."""
    importlinter = pytest.importorskip(
        "importlinter.cli", reason="import-linter is a dev dependency"
    )
    assert importlinter.lint_imports(cache_dir=None, is_debug_mode=False) == 0


def test_the_contracts_can_fail(tmp_path: Path) -> None:
    """A kernel module that imports upwards is refused: the check above is not vacuous."""
    pytest.importorskip("importlinter.cli", reason="import-linter is a dev dependency")
    contracts = (ROOT / "pyproject.toml").read_text()
    package = tmp_path / "dsv4"
    for name in ("dsv4", *re.findall(r'"(dsv4\.[a-z_.]+)"', contracts)):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    # The one import that the contracts excuse must exist, or the linter calls the excuse stale.
    (package / "engine" / "generate.py").touch()
    (package / "model" / "model.py").write_text("from dsv4.engine import generate\n")
    (package / "kernels" / "bad.py").write_text("from dsv4.ops import anything\n")
    (tmp_path / "pyproject.toml").write_text(contracts)
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports; "
               "raise SystemExit(lint_imports(cache_dir=None))"]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "dsv4.kernels.bad" in result.stdout
