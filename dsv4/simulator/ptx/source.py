"""Lines of source code that instructions come from, and the functions around them."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

SourceLine = tuple[str, int]  # file and line


@lru_cache(maxsize=256)
def _functions(path: str) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions in a Python file, inner ones last."""
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return sorted((node.lineno, node.end_lineno or node.lineno, node.name) for node in found)


def function_at(line: SourceLine) -> str:
    """The innermost Python function around a line; "" for other languages and missing files."""
    path, number = line
    if not path.endswith(".py"):
        return ""
    names = [name for first, last, name in _functions(path) if first <= number <= last]
    return names[-1] if names else ""


def describe(chain: tuple[SourceLine, ...]) -> str:
    """Where code was written, then where each inlined function around it was called from."""
    out = []
    for path, number in chain:
        name = function_at((path, number))
        out.append(f"{path}:{number}" + (f" in {name}" if name else ""))
    return ", called from ".join(out) or "no line information"
