"""Words: the first line of a module or class is a noun phrase."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A clause or an order where a thing should be named.
STARTS = {
    "What", "How", "Whether", "Where", "Which", "Who", "When", "Why",
    "Keeps", "Lets", "Runs", "Running", "Makes", "Making", "Does", "Turns", "Stands", "Computes",
    "Adds", "Gives", "Takes", "Holds", "Reads", "Writes", "Sends", "Knows", "Tells", "Says",
    "Receives", "Collects", "Prints", "Converts", "Finishes", "Rotates", "Hands", "Simulates",
    "Choosing", "Writing", "Spreading", "From", "Of",
}  # fmt: skip
REPLACED = ("patience", "await_others", "nobody asks", "hand_over")
PERSONS = re.compile(r"\b(nobody|somebody|anybody|everybody)\b(?!'s)", re.IGNORECASE)
FILES = sorted((ROOT / "dsv4").rglob("*.py"))


def first_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(name, first line) of a module and its classes; the name alone where there is none."""
    text = path.read_text()
    tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in [tree, *nodes] if text.strip() else []:
        line = (ast.get_docstring(node) or "").partition("\n")[0]
        yield getattr(node, "name", "module"), line


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: p.name)
def test_first_lines_are_noun_phrases(folder: Path) -> None:
    found = {
        f"{path.name}, {name}": line
        for path in folder.glob("*.py")
        for name, line in first_lines(path)
        if line.partition(" ")[0] in STARTS or not line
    }
    assert not found


def test_hardware_and_threads_are_no_persons() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("kernels", "simulator", "engine")
        for path in sorted((ROOT / "dsv4" / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PERSONS.search(line)
    ]
    assert not found


def test_a_clause_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Tools."""\n\n\nclass A:\n    """What a does."""\n')
    assert list(first_lines(path)) == [("module", "Tools."), ("A", "What a does.")]


def test_replaced_words_do_not_come_back() -> None:
    """Hardware is no person: words of meetings and patience were replaced."""
    found = {
        f"{path.name}: {word}"
        for path in (ROOT / "dsv4" / "kernels").rglob("*.py")
        for word in REPLACED
        if word in path.read_text()
    }
    assert not found
