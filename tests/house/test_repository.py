"""Rules about the repository itself: sizes, line budgets, the stage table, the two commands."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lowp_stages
from tests.conftest import FIRST, UNITS, unit_of
from tests.house.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 14 * 2**20
MAX_HOST_LINES, MAX_KERNEL_LINES, MAX_FUNCTION_LINES = 500, 900, 80


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_the_repository_stays_small() -> None:
    assert sum(path.stat().st_size for path in tracked_files()) < MAX_BYTES


def test_files_keep_to_their_budget() -> None:
    too_long = {}
    for path in tracked_files():
        if path.suffix != ".py":
            continue
        kernel = path.is_relative_to(ROOT / "dsv4" / "kernels")
        lines = len(path.read_text().splitlines())
        if lines > (MAX_KERNEL_LINES if kernel else MAX_HOST_LINES):
            too_long[str(path.relative_to(ROOT))] = lines
    assert not too_long


def functions_of(scope: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Functions of a module and methods of its classes; what is inside of them is theirs."""
    for node in scope.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node)


def lines_of(function: ast.FunctionDef) -> int:
    """Lines of a function but for its docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_functions_keep_to_their_budget() -> None:
    too_long = {
        f"{path.relative_to(ROOT)}, {node.name}": lines_of(node)
        for path in sorted((ROOT / "dsv4").rglob("*.py"))
        for node in functions_of(ast.parse(path.read_text()))
        if lines_of(node) > MAX_FUNCTION_LINES
    }
    assert not too_long


@pytest.mark.parametrize("name", ["demo", "test"])
def test_the_two_commands_are_executable(name: str) -> None:
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    assert f"scripts/{name}" in (ROOT / "README.md").read_text()


def run_stages(results: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    path = folder / "results.json"
    path.write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["stages", "--results", str(path)])
    return load_script("stages").main()


def test_a_failing_stage_fails_the_table(tmp_path: Path, monkeypatch, capsys) -> None:
    passed = {"op": {"cpu": {"tests/x.py::test": "passed"}}}
    assert run_stages(passed, tmp_path, monkeypatch) == 0
    failed = {"op": {"cpu": {"tests/x.py::test": "failed"}}}
    assert run_stages(failed, tmp_path, monkeypatch) == 1
    assert "op" in capsys.readouterr().err


def test_stages_of_quantised_attention_are_the_rows_of_its_page() -> None:
    page = (ROOT / "docs" / "design" / "lowp.md").read_text()
    rows = re.findall(r"^\| (lowp-[\w-]+) \|", page, re.MULTILINE)
    listed = [name for name, _ in load_script("stages").STAGES if name.startswith("lowp-")]
    assert rows == listed == list(lowp_stages.STAGES)
    for entries in lowp_stages.STAGES.values():
        for entry in entries:
            file, _, function = entry.split(" ")[0].partition("::")
            assert f"def {function}(" in (ROOT / file).read_text(), entry
    assert lowp_stages.stages_of(
        "tests/kernels/lowp/test_attention.py::test_formats[64-a mask]"
    ) == ["lowp-masks"]


def test_runs_on_several_machines_are_merged() -> None:
    """A test that one machine skips and another runs counts as run; a failure anywhere counts."""
    stages = load_script("stages")
    here = {"op": {"cpu": {"a": "passed"}, "H200": {"b": "skipped", "c": "skipped"}}}
    there = {"op": {"H200": {"b": "passed", "c": "failed"}}}
    merged = stages.merge([here, there])
    assert merged == {"op": {"cpu": {"a": "passed"}, "H200": {"b": "passed", "c": "failed"}}}
    assert stages.failing_stages(merged) == ["op"]
    assert stages.cell(merged["op"]["H200"]) == "1, 1 failed"
    assert stages.cell(here["op"]["H200"]) == "0 of 2"
    assert stages.cell({}) == "-"


def test_recorded_passes_count_where_their_file_still_holds_tests() -> None:
    stages = load_script("stages")
    recorded = {"x.py": 3, "gone.py": 5}
    assert stages.cell({"x.py::a": "skipped", "x.py::b": "skipped"}, recorded) == "3"
    assert stages.cell({"x.py::a": "skipped", "y.py::c": "skipped"}, recorded) == "3 of 4"
    assert stages.passed_by_file({"x.py::a": "passed", "x.py::b": "failed"}) == {"x.py": 1}


def test_rows_of_other_stages_stay_as_they_are() -> None:
    stages = load_script("stages")
    known = "| stage |\n| op | 5 |\n| lowp | 3 |\n"
    page = "| stage |\n| op | 1 |\n| lowp | 4 |\n| lowp-object | 1 |\n"
    assert stages.keep_others(page, known, "lowp") == page.replace("| op | 1 |", "| op | 5 |")
    assert stages.keep_others(page, known, "") == page


def test_an_unknown_stage_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    unknown = {"Z9": {"cpu": {"tests/x.py::test": "passed"}}}
    assert run_stages(unknown, tmp_path, monkeypatch) == 1
    assert "Z9" in capsys.readouterr().err


def test_units_of_workers_are_files_and_folders_that_are_there() -> None:
    assert unit_of("tests/cli/test_cli.py::test_a[x::y]") == "tests/cli/test_cli.py"
    for folder in UNITS:
        assert list((ROOT / folder).rglob("test_*.py"))
        assert unit_of(f"{folder}/sm90/test_a.py::test_b") == folder
    assert all((ROOT / folder).is_dir() for folder in FIRST)


def test_stages_names_only_existing_tests() -> None:
    """STAGES.md is generated; a row naming a file or folder that is gone is stale."""
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "STAGES.md").read_text())
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
