"""Lines of source code that instructions come from, and the functions around them."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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


class Role(NamedTuple):
    """Branch of a kernel's function: its lines, and what it is called."""

    first: int
    last: int
    name: str


class Kernel(NamedTuple):
    """A Python function decorated as a kernel, and its branches, inner ones last."""

    first: int
    last: int
    roles: tuple[Role, ...]


@lru_cache(maxsize=256)
def _kernels(path: str) -> list[Kernel]:
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(map(_is_kernel, node.decorator_list)):
            roles = [role for branch in ast.walk(node) for role in _roles(branch)]
            roles.sort(key=lambda role: (role.first, -role.last))
            found.append(Kernel(node.lineno, node.end_lineno or node.lineno, tuple(roles)))
    return found


def _is_kernel(decorator: ast.expr) -> bool:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "kernel"


def _roles(node: ast.AST) -> list[Role]:
    """Branches by warp: a branch that ends in a call is named by what it calls, another one by
    its condition."""
    if not isinstance(node, ast.If) or not re.search("warp|group", ast.unparse(node.test)):
        return []
    test, roles = ast.unparse(node.test), []
    for body, name in ((node.body, test), (node.orelse, f"not ({test})")):
        # An `elif` begins where its `if` does: its branches are roles of their own.
        if not body or (isinstance(body[0], ast.If) and body[0].col_offset == node.col_offset):
            continue
        last = body[-1].value if isinstance(body[-1], ast.Expr) else None
        if isinstance(last, ast.Call) and isinstance(last.func, ast.Attribute | ast.Name):
            name = last.func.attr if isinstance(last.func, ast.Attribute) else last.func.id
        roles.append(Role(body[0].lineno, body[-1].end_lineno or body[-1].lineno, name))
    return roles


def kernel_at(line: SourceLine) -> Kernel | None:
    """The kernel whose function a line is in."""
    path, number = line
    if not path.endswith(".py"):
        return None
    return next((k for k in _kernels(path) if k.first <= number <= k.last), None)


@lru_cache(maxsize=256)
def assigned_at(line: SourceLine) -> str:
    """The variable that a statement of Python assigns to; "" where it assigns to another place."""
    try:
        tree = ast.parse(Path(line[0]).read_text())
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.lineno <= line[1] <= (node.end_lineno or 0):
            target = node.targets[0]
            return target.id if len(node.targets) == 1 and isinstance(target, ast.Name) else ""
    return ""


@lru_cache(maxsize=4096)
def role_at(chain: tuple[SourceLine, ...]) -> str:
    """The branch of the kernel, by warp, that code is in; "" where none is known."""
    kernel = kernel_at(chain[-1]) if chain else None
    if kernel is None:
        return ""
    inside = [role.name for role in kernel.roles if role.first <= chain[-1][1] <= role.last]
    return inside[0] if inside else ""


def describe(chain: tuple[SourceLine, ...]) -> str:
    """Where code was written, then where each inlined function around it was called from."""
    out = []
    for path, number in chain:
        name = function_at((path, number))
        out.append(f"{path}:{number}" + (f" in {name}" if name else ""))
    return ", called from ".join(out) or "no line information"
