"""Mutations of a package's source, addressed by function and syntax.

    release = at("Fmha1Cta._pv").call("kv.consumer_release").delete()
    build = mutated(build, tmp_path, release)          # twin of `build`, from the changed copy

An address is the qualified name of a function and a way down its syntax tree (`places`). Modules
may be moved, renamed and reformatted under it. It must lead to one node of the package: what is
absent or ambiguous raises `MutationError`, which lists what there is.

The copy is edited as text, and no line moves: compilers that read their source through `inspect`
see real files, and report the lines of the originals.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from dsv4.testing.places import (
    Edit,
    MutationError,
    at,
    below,
    describe,
    find,
    functions_of,
    sources_of,
)

__all__ = ["Edit", "MutationError", "at", "check", "mutated"]

KERNELS = "dsv4.kernels"
_serial = itertools.count()


def mutated(function: Callable, folder: Path, *edits: Edit, package: str = KERNELS) -> Callable:
    """The twin of a function in a changed copy of its package.

    Args:
        function: defined at the top level of a module of `package`.
        folder: where the copy goes; stays in use while the process runs.
        edits: all of them are made; they must not overlap.
        package: copied whole, and imported under another name.

    Raises:
        MutationError: see `Place`.
    """
    name = f"{package.replace('.', '_')}_mutated_{next(_serial)}"
    root = _folder(package)
    changed = _changed_sources(root, edits)
    own_name = re.compile(rf"(?<![\w.]){re.escape(package)}(?!\w)")
    for path in sources_of(root):
        text = changed.get(path) or path.read_bytes()
        target = folder / name / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(own_name.sub(name, text.decode()))
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        twin = importlib.import_module(own_name.sub(name, function.__module__))
    finally:
        sys.path.remove(str(folder))
    return getattr(twin, function.__qualname__)


def check(*edits: Edit, package: str = KERNELS) -> None:
    """Raise MutationError unless every edit has its place; neither copies nor imports anything."""
    _changed_sources(_folder(package), edits)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MutationError(f"package: {package} is not one")
    return Path(spec.submodule_search_locations[0])


# ---- edits of text ----


def _changed_sources(root: Path, edits: tuple[Edit, ...]) -> dict[Path, bytes]:
    """New contents of the files that change."""
    functions = list(functions_of(root))
    spans: dict[Path, list[tuple[int, int, bytes]]] = {}
    for edit in edits:
        function, node = find(edit.place, functions)
        source = function.path.read_bytes()
        try:
            span = _span(edit, node, function.node, source)
        except MutationError as error:
            raise MutationError(f"{edit.place}: {function}: {error}") from None
        spans.setdefault(function.path, []).append(span)
    changed = {}
    for path, changes in spans.items():
        text, end = path.read_bytes(), None
        for begin, stop, new in sorted(changes, reverse=True):
            if end is not None and stop > end:
                raise MutationError(f"{path.name}: two edits overlap")
            text, end = text[:begin] + new + text[stop:], begin
        try:
            ast.parse(text, str(path))
        except SyntaxError as error:
            raise MutationError(
                f"{path.name}, line {error.lineno}: the edit is no Python"
            ) from None
        changed[path] = text
    return changed


def _span(edit: Edit, node: ast.AST, function: ast.AST, source: bytes) -> tuple[int, int, bytes]:
    """Bytes of a file that an edit replaces, and what by; as many lines as there were."""
    if edit.is_statement:
        node = _statement(node, function)
    begin, end = _extent(node, source)
    if edit.swaps:
        begin_next, end_next = _extent(_next_statement(node, function), source)
        between = source[end:begin_next]
        return begin, end_next, source[begin_next:end_next] + between + source[begin:end]
    old = source[begin:end]
    new = edit.source.replace("{}", f"({old.decode()})").encode()
    if edit.is_statement:
        try:
            statements = ast.parse(new).body
        except SyntaxError as error:
            raise MutationError(f"`{edit.source}` is no Python: {error.msg}") from None
        if any(hasattr(statement, "body") for statement in statements):
            raise MutationError(f"`{edit.source}` is no row of simple statements: lines would move")
        new = "; ".join(map(ast.unparse, statements)).encode()
        return begin, end, new + b"\n" * old.count(b"\n")
    if not isinstance(node, ast.expr) or isinstance(node, (ast.Slice, ast.Starred)):
        raise MutationError(f"`{describe(node)}` is no expression")
    # Parentheses keep precedence as meant, and blank lines inside them end no statement.
    missing = old.count(b"\n") - new.count(b"\n")
    if missing < 0:
        raise MutationError(f"`{edit.source}` has more lines than what it replaces")
    return begin, end, b"(" + new + b"\n" * missing + b")"


def _extent(node: ast.AST, source: bytes) -> tuple[int, int]:
    """First byte and the one past the last; offsets of a syntax tree count bytes."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    return (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )


def _statement(node: ast.AST, function: ast.AST) -> ast.stmt:
    """The node if it is a statement, or the statement that it is all of."""
    if isinstance(node, ast.stmt) and node is not function:
        return node
    for statement in below(function, ast.Expr):
        if statement.value is node:
            return statement
    raise MutationError(f"`{describe(node)}` is no statement of the function")


def _next_statement(statement: ast.stmt, function: ast.AST) -> ast.stmt:
    for parent in ast.walk(function):
        for block in ("body", "orelse", "finalbody"):
            siblings = getattr(parent, block, None)
            if isinstance(siblings, list) and statement in siblings[:-1]:
                return siblings[siblings.index(statement) + 1]
    raise MutationError(f"`{describe(statement)}` is the last statement of its block")
