"""Pages: snippets and examples run, links lead somewhere, what is generated is current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_of_the_readme_run(number: int) -> None:
    run(sys.executable, "-c", SNIPPETS[number])


def test_the_readme_has_its_snippets() -> None:
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(name: str) -> None:
    if name == "simulate.py":
        pytest.importorskip("cutlass")
    assert run(sys.executable, f"examples/{name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not missing


def test_the_page_of_operators_is_current() -> None:
    run(sys.executable, "scripts/docs", "--check")
