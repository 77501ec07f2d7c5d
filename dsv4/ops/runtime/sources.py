"""The sources of a module: its file and those of all modules of its package that it imports.

Found by parsing, so that nothing is imported: a compiled kernel is looked up by the digest of its
sources, also where the kernel compiler is missing. What no compiler reads is left out, so that
another comment or docstring leaves compiled kernels as they are.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Under it line numbers are part of what is compiled, and so is whatever moves them.
LINE_INFO = "CUTE_DSL_LINEINFO"
_STRINGS = (ast.JoinedStr, *([ast.TemplateStr] if hasattr(ast, "TemplateStr") else []))
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class _Source(NamedTuple):
    """Imports of a file, as nodes, and its code."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    code: bytes


class _Span(NamedTuple):
    """Place of a part of a text, in bytes: lines from 1 on, columns from 0 on."""

    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of(cls, node: ast.AST) -> _Span:
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def columns(self, line: int) -> tuple[int, float]:
        """The part that is in a line."""
        first = self.column if line == self.line else 0
        return first, self.end_column if line == self.end_line else float("inf")


@cache
def digest(module: str) -> str:
    """Digest of the sources of a module, by name and code; once per process."""
    total = hashlib.sha256()
    for name, path in sorted(closure(module).items()):
        text = path.read_bytes()
        code = text if os.environ.get(LINE_INFO) else _source(text).code
        total.update(name.encode() + b"\0" + code + b"\0")
    return total.hexdigest()[:16]


def closure(module: str) -> dict[str, Path]:
    """Files of a module and of what it imports from its top-level package, by module name.

    Imports inside functions count, and so do the `__init__` files of packages on the way, which run
    when a module below them is imported; that of the top-level package does not, because it leads
    to everything and kernels take nothing from it.

    Raises:
        ModuleNotFoundError: no file for `module`.
    """
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    if not folders or _file(Path(folders[0]), module) is None:
        raise ModuleNotFoundError(f"no source of {module} was found", name=module)
    root = Path(folders[0])
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(root, name)
        if name in found or name == package or path is None:
            continue
        found[name] = path
        waiting.append(name.rpartition(".")[0])
        waiting += (other for other in _imports(name, path) if other.startswith(package + "."))
    return found


def _file(root: Path, module: str) -> Path | None:
    """File of a module below the folder of its top-level package; None for what is no module."""
    place = root.joinpath(*module.split(".")[1:])
    for path in (place / "__init__.py", place.with_name(place.name + ".py")):
        if path.is_file():
            return path
    return None


def _imports(module: str, path: Path) -> Iterator[str]:
    """Absolute names that a file imports; `from a import b` may mean a module a.b."""
    base = module.split(".")
    if path.name != "__init__.py":
        base = base[:-1]
    for node in _source(path.read_bytes()).imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            start = [] if node.level == 0 else base[: len(base) - node.level + 1]
            parent = ".".join([*start, *filter(None, [node.module])])
            yield parent
            yield from (f"{parent}.{alias.name}" for alias in node.names)


@cache
def _source(text: bytes) -> _Source:
    """Imports and code of a file, the same for every version of Python."""
    imports: list[ast.Import | ast.ImportFrom] = []
    strings: list[_Span] = []
    documents: list[_Span] = []
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documents.append(_Span.of(node.body[0]))
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            strings.append(_Span.of(node))
        elif isinstance(node, _STRINGS):
            # Where the nodes inside it are depends on the version.
            strings.append(_Span.of(node))
        else:
            waiting += ast.iter_child_nodes(node)
    return _Source(tuple(imports), _code(text, strings, documents))


def _code(text: bytes, strings: list[_Span], documents: list[_Span]) -> bytes:
    """A text without docstrings, comments, empty lines and spaces at the end of lines."""
    in_line: dict[int, list[tuple[int, float]]] = {}
    for span in strings:
        for line in range(span.line, span.end_line + 1):
            in_line.setdefault(line, []).append(span.columns(line))
    cut: dict[int, tuple[int, float]] = {}
    for span in documents:
        for line in range(span.line, span.end_line + 1):
            cut[line] = span.columns(line)
    kept = []
    for number, line in enumerate(text.split(b"\n"), 1):
        own = in_line.get(number, [])
        if number in cut:
            first, last = cut[number]
            line = line[:first] + (b"" if last == float("inf") else line[int(last) :])
            own = []
        comment = line.find(b"#")
        while comment >= 0 and any(first <= comment < last for first, last in own):
            comment = line.find(b"#", comment + 1)
        line = line if comment < 0 else line[:comment]
        # What a string leaves open ends where the string says.
        if not any(last == float("inf") for _, last in own):
            line = line.rstrip()
            if not line:
                continue
        kept.append(line)
    return b"\n".join(kept)
