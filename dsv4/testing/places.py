"""Addresses of syntax: a function of a package, and the way down its tree to one node."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MOST_CANDIDATES = 12  # in a message


class MutationError(ValueError):
    """An address that leads nowhere or to several places, or an edit that its place cannot take."""


class AmbiguousError(MutationError):
    """An address that leads to several places of one function."""


@dataclass(frozen=True)
class Place:
    """A node of a function's syntax tree; each method goes further down or ends in an edit.

    Searches go through everything below the node so far, in source order. `nth`, from 0, chooses
    where several match; without it there must be one. Snippets are compared as syntax: spaces, line
    breaks and redundant parentheses do not matter.
    """

    function: str
    steps: tuple[_Step, ...] = ()

    def call(self, name: str, nth: int | None = None) -> Place:
        """A call by the end of its dotted name: "consumer_wait" finds `pipes.q.consumer_wait(x)`.

        What is called in between counts as `()`: "NamedBarrier().arrive".
        """
        wanted = name.split(".")
        return self._search(
            ("call", name),
            ast.Call,
            lambda node: _dotted(node.func)[-len(wanted) :] == wanted,
            nth,
        )

    def assignment(self, target: str, nth: int | None = None) -> Place:
        """An assignment by one of its targets."""
        wanted = _normal(target)
        return self._search(
            ("assignment", target),
            (ast.Assign, ast.AugAssign, ast.AnnAssign),
            lambda node: any(ast.unparse(t) == wanted for t in _targets(node)),
            nth,
        )

    def branch(self, test: str, nth: int | None = None) -> Place:
        """An `if` or `elif` statement by its test."""
        wanted = _normal(test)
        return self._search(
            ("branch", test), ast.If, lambda node: ast.unparse(node.test) == wanted, nth
        )

    def expression(self, source: str, nth: int | None = None) -> Place:
        """An expression as it is written: a name, an operation, a constant."""
        wanted = _normal(source)
        return self._search(
            ("expression", source), ast.expr, lambda node: ast.unparse(node) == wanted, nth
        )

    def argument(self, which: int | str) -> Place:
        """An argument of a call, by position or keyword."""
        return self._part(f"argument({which!r})", lambda node: _argument(node, which))

    @property
    def value(self) -> Place:
        """The right-hand side of an assignment."""
        return self._part("value", lambda node: getattr(node, "value", None))

    @property
    def test(self) -> Place:
        """The condition of a branch."""
        return self._part("test", lambda node: getattr(node, "test", None))

    def delete(self) -> Edit:
        """Take a statement out, or a call that is a statement."""
        return Edit(self, "pass", is_statement=True)

    def replace(self, source: str) -> Edit:
        """Write something else there: an expression, or simple statements for a statement.

        "{}" in `source` stands for what was there.
        """
        return Edit(self, source, is_statement=not _is_expression(source.replace("{}", "_")))

    def swap_with_next(self) -> Edit:
        """Exchange a statement with the one after it."""
        return Edit(self, "", is_statement=True, swaps=True)

    def __str__(self) -> str:
        return ".".join((f'at("{self.function}")', *(step.text for step in self.steps)))

    def _search(self, said: tuple[str, str], kind, matches, nth: int | None) -> Place:
        chosen = "" if nth is None else f", nth={nth}"
        step = _Step(f'{said[0]}("{said[1]}"{chosen})', said[1], kind, matches, nth)
        return Place(self.function, (*self.steps, step))

    def _part(self, text: str, part: Callable[[ast.AST], ast.AST | None]) -> Place:
        return Place(self.function, (*self.steps, _Step(text, part=part)))


@dataclass(frozen=True)
class Edit:
    """Change of a place.

    Attributes:
        source: what is written there.
        is_statement: whether it takes the place of a statement.
        swaps: whether the statement there changes places with its successor instead.
    """

    place: Place
    source: str
    is_statement: bool
    swaps: bool = False


def at(function: str) -> Place:
    """A function by its qualified name, `Class.method` or `outer.inner`, wherever it is defined.

    Where modules have functions of the same name the rest of the address may decide; if it does
    not, "module:Class.method" does, with the end of the module's dotted name.
    """
    return Place(function)


# ---- ways down a tree ----


class _Step(NamedTuple):
    """One step of an address: a search below the node, or a part of it."""

    text: str
    wanted: str = ""
    kind: type | tuple[type, ...] = ()
    matches: Callable[[ast.AST], bool] | None = None
    nth: int | None = None
    part: Callable[[ast.AST], ast.AST | None] | None = None


def _follow(node: ast.AST, steps: tuple[_Step, ...]) -> ast.AST:
    """The node that the steps lead to; MutationError says where they end."""
    for step in steps:
        if step.part is not None:
            found = step.part(node)
            if found is None:
                raise MutationError(f"`{describe(node)}` has no {step.text}")
            node = found
            continue
        candidates = below(node, step.kind)
        matching = [candidate for candidate in candidates if step.matches(candidate)]
        if not matching:
            nearest = _nearest(step.wanted, candidates)
            raise MutationError(f"no {step.text}; candidates: {_list(nearest)}")
        if step.nth is None and len(matching) > 1:
            raise AmbiguousError(f"{step.text} is there {len(matching)} times: {_list(matching)}")
        if (step.nth or 0) >= len(matching):
            raise MutationError(f"no {step.text}, only: {_list(matching)}")
        node = matching[step.nth or 0]
    return node


def below(node: ast.AST, kind: type | tuple[type, ...]) -> list[ast.AST]:
    """The node itself and what is below it, of one kind, in source order, outer before inner."""
    found = [child for child in ast.walk(node) if isinstance(child, kind)]
    return sorted(found, key=_position)


def _position(node: ast.AST) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, -node.end_lineno, -node.end_col_offset


def _nearest(wanted: str, nodes: list[ast.AST]) -> list[ast.AST]:
    """The nodes that read most like a snippet, in source order."""

    def difference(node: ast.AST) -> float:
        return -difflib.SequenceMatcher(None, wanted, describe(node)).ratio()

    return sorted(sorted(nodes, key=difference)[:MOST_CANDIDATES], key=_position)


def _dotted(node: ast.AST) -> list[str]:
    """Components of what is called: `a.b(x).c` gives a, b(), c."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    if isinstance(node, ast.Call):
        *first, last = _dotted(node.func)
        return [*first, f"{last}()"]
    return [ast.unparse(node)]


def _targets(node: ast.AST) -> list[ast.AST]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _argument(node: ast.AST, which: int | str) -> ast.AST | None:
    if not isinstance(node, ast.Call):
        return None
    if isinstance(which, int):
        return node.args[which] if which < len(node.args) else None
    return next((keyword.value for keyword in node.keywords if keyword.arg == which), None)


def _normal(source: str) -> str:
    return ast.unparse(ast.parse(source, mode="eval"))


def _is_expression(source: str) -> bool:
    try:
        ast.parse(source, mode="eval")
    except SyntaxError:
        return False
    return True


def describe(node: ast.AST) -> str:
    """The beginning of a node's source."""
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _list(nodes: list[ast.AST]) -> str:
    """Nodes with their lines, as far as they can be read."""
    said = [f"line {node.lineno} `{describe(node)}`" for node in nodes[:MOST_CANDIDATES]]
    more = len(nodes) - len(said)
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "") if nodes else "none"


# ---- functions of a package ----


class Function(NamedTuple):
    """Place where a function is defined."""

    path: Path
    module: str  # dotted, relative to the package
    name: str
    node: ast.AST

    def __str__(self) -> str:
        return f"{self.module}:{self.name} (line {self.node.lineno})"


def sources_of(root: Path) -> list[Path]:
    """Source files of a package, from its folder."""
    return sorted(root.rglob("*.py"))


def functions_of(root: Path) -> Iterator[Function]:
    """Every function of a package, also of classes and functions."""
    for path in sources_of(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        yield from _functions_of_file(path, module, path.read_bytes())


@functools.cache
def _functions_of_file(path: Path, module: str, source: bytes) -> tuple[Function, ...]:
    """Every function of a file; a package has many mutations, and is parsed once."""

    def defined_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if not isinstance(child, ast.ClassDef):
                    yield prefix + child.name, child
                yield from defined_in(child, f"{prefix}{child.name}.")
            else:
                yield from defined_in(child, prefix)

    nodes = defined_in(ast.parse(source, str(path)), "")
    return tuple(Function(path, module, name, node) for name, node in nodes)


def find(place: Place, functions: list[Function]) -> tuple[Function, ast.AST]:
    """The function and node of an address; MutationError unless there is exactly one."""
    module, _, name = place.function.rpartition(":")
    of_module = [f for f in functions if not module or f".{f.module}".endswith(f".{module}")]
    named = [function for function in of_module if function.name == name]
    if not named:
        raise MutationError(f'no function "{place.function}"; similar: {_similar(name, functions)}')
    found, reasons, is_ambiguous = [], [], False
    for function in named:
        try:
            found.append((function, _follow(function.node, place.steps)))
            reasons.append(f"{function}: line {found[-1][1].lineno}")
        except MutationError as error:
            reasons.append(f"{function}: {error}")
            is_ambiguous |= isinstance(error, AmbiguousError)
    if len(found) != 1 or is_ambiguous:
        raise MutationError(f"{place}: {' | '.join(reasons)}")
    return found[0]


def _similar(name: str, functions: list[Function]) -> str:
    last = name.rpartition(".")[2]
    same = [f for f in functions if f.name.rpartition(".")[2] == last]
    names = difflib.get_close_matches(name, {f.name for f in functions}, n=5)
    close = [f for f in functions if f.name in names and f not in same]
    return "; ".join(map(str, same + close)) or "none"
