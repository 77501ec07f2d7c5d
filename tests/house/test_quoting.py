"""Quotes of foreign values, and the rule that messages have no others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from dsv4.quoting import LINE, QUOTE, printable, quoted

ROOT = Path(__file__).resolve().parents[2]
# Oracles and helpers of tests, whose callers are ours; the simulator, which imports nothing else.
SIDECARS = {"reference", "testing", "simulator"}


class Broken:
    """A value without a representation."""

    def __repr__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("a\nb\x1b[31m", r"'a\nb\x1b[31m'"),
        ({"type": "yarn", "factor": 16.0}, "{'factor': 16.0, 'type': 'yarn'}"),
        (torch.zeros(2, 3).shape, "(2, 3)"),
        (torch.tensor([[1], [2]]), "tensor([[1], [2]])"),
        ([0] * 8, "[0, 0, 0, 0, 0, 0, ...]"),
        ([10**5000], "a value that cannot be printed (list)"),
    ],
)
def test_quotes(value: object, text: str) -> None:
    assert quoted(value) == text


@pytest.mark.parametrize(
    "value",
    [
        *("x" * 10**6, "\x1b" * 10**6, b"x" * 10**6, 10**4000, [[[["y" * 99] * 9] * 9] * 9] * 9),
        *(Broken(), [Broken()], torch.zeros((1,) * 500).shape, torch.zeros(10**6), {1: {2: {}}}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_quotes_are_short_and_printable(value: object) -> None:
    text = quoted(value)
    assert text and text.isprintable() and len(text) <= QUOTE


def test_printable_keeps_what_can_be_printed() -> None:
    assert printable("é 你 layers.1") == "é 你 layers.1"
    assert printable("a\tb\udcff\n") == r"a\tb\udcff\n"


@pytest.mark.parametrize("size", [LINE - 1, LINE, LINE + 1, 2 * LINE, 2 * LINE + 1, 10**6])
@pytest.mark.parametrize("character", ["x", "\x1b"])
def test_long_lines_keep_both_ends(size: int, character: str) -> None:
    text = printable("first" + character * (size - 9) + "last")
    assert text.isprintable() and text.startswith("first") and text.endswith("last")
    assert len(text) == size if (character == "x" and size <= LINE) else len(text) == LINE


def raised_with_repr(path: Path) -> list[str]:
    """Where a module raises or warns with a whole `repr`: {value!r}, which nothing bounds."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        warns = isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
        if isinstance(node, ast.Raise) or warns:
            found += [
                f"{path.name}:{part.lineno}"
                for part in ast.walk(node)
                if isinstance(part, ast.FormattedValue) and part.conversion == ord("r")
            ]
    return found


def test_messages_quote_what_is_foreign() -> None:
    files = [
        path
        for path in (ROOT / "dsv4").rglob("*.py")
        if path.relative_to(ROOT / "dsv4").parts[0] not in SIDECARS
    ]
    assert len(files) > 100
    assert not [place for path in files for place in raised_with_repr(path)]


def test_a_whole_repr_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('def f(x):\n    raise ValueError(f"got {x!r}")\n')
    assert raised_with_repr(path) == ["a.py:2"]
