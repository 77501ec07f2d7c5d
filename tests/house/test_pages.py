"""Pages: snippets and examples run, links lead somewhere, what is generated is current."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# One interpreter for all scripts, each run as by itself: every process would load torch anew.
SCRIPT = """
import contextlib, io, json, runpy, sys, traceback
found = {}
for path in sys.argv[1:]:
    output, sys.argv = io.StringIO(), [path]
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path, run_name="__main__")
        found[path] = [True, output.getvalue()]
    except BaseException:
        found[path] = [False, traceback.format_exc()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bool, str]]:
    """Whether each snippet and example ran, and what it printed or raised, by its name."""
    folder = tmp_path_factory.mktemp("snippets")
    scripts = {name: ROOT / "examples" / name for name in EXAMPLES}
    for number, text in enumerate(SNIPPETS):
        scripts[f"snippet {number}"] = folder / f"{number}.py"
        scripts[f"snippet {number}"].write_text(text)
    if importlib.util.find_spec("cutlass") is None:
        del scripts["simulate.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, *map(str, scripts.values())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: tuple(found[str(path)]) for name, path in scripts.items()}


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_of_the_readme_run(number: int, outputs) -> None:
    ran, text = outputs[f"snippet {number}"]
    assert ran, text


def test_the_readme_has_its_snippets() -> None:
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, outputs) -> None:
    if name not in outputs:
        pytest.skip("simulate.py needs CuTeDSL")
    ran, text = outputs[name]
    assert ran and text, text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not missing


def test_the_pages_that_are_made_from_code_are_current(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["docs", "--check"])
    assert load_script("docs").main() == 0, capsys.readouterr().err


def test_the_ways_on_the_page_of_the_house_can_be_gone() -> None:
    """Every file that it names is there, and every function of the newcomer's path is in one of the
    files of its row."""
    page = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "dsv4"
    folders = [ROOT, package, *(path for path in package.rglob("*") if path.is_dir())]

    def found(name: str) -> list[Path]:
        spelled = [name.replace("{sm90,sm100}", arch) for arch in ("sm90", "sm100")]
        return [path for one in spelled for folder in folders for path in folder.glob(one)]

    names = re.findall(r"`([\w/{},*.]+\.py)`", page)
    assert names and not [name for name in names if not found(name)]
    path = page.partition("## A newcomer's path")[2].partition("\n## ")[0]
    for row in path.splitlines():
        files = [file for name in re.findall(r"`([\w/.]+\.py)`", row) for file in found(name)]
        text = "".join(file.read_text() for file in files)
        names = [name for name in re.findall(r"`(_?[a-z]\w+)`", row) if not found(name)]
        assert not files or not [name for name in names if f"def {name}(" not in text], row


def test_the_page_of_the_house_names_every_operator() -> None:
    """With kernels that are there."""
    import dsv4.ops  # noqa: F401
    from dsv4.ops.runtime.registry import OPS

    table = (ROOT / "docs/architecture.md").read_text().partition("## Operators")[2]
    table = table.partition("\n## ")[0]
    missing = [name for name in OPS if f"`{name}`" not in table]
    assert not missing
    kernels = ROOT / "dsv4/kernels"
    places = [
        place.replace("{sm90,sm100}", arch)
        for row in table.splitlines()[4:]
        for place in re.findall(r"`([^`]+)`", row.rpartition("| ")[2])
        for arch in ("sm90", "sm100")
    ]
    absent = sorted({place for place in places if not (kernels / place).exists()})
    assert places and not absent
