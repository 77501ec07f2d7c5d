"""Equal operations of one block on different registers, computed together.

A numpy call on 32 lanes costs more than its arithmetic. Elementwise operations of a block are put
off until something else needs one of their results; those of one kind that do not depend on each
other then become one call on [operations, lanes]. Their results stay rows of that array, which the
next operations that need all of them take as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# From how many on it pays: operations that take several numpy calls each, and those that are one.
_LEAST_COMPOUND, _LEAST_SIMPLE = 4, 8


class Argument(NamedTuple):
    """An operand: its register, if it is one, the variable, and how to view that (or "")."""

    register: str | None
    name: str
    view: str = ""


class _Operation(NamedTuple):
    """Assignment of a register."""

    register: str
    name: str  # of the variable it defines
    arguments: tuple[Argument, ...]


class Batches:
    """Operations of a block put off so far. `line` emits Python, `temporary` names a variable."""

    def __init__(self, line: Callable[[str], None], temporary: Callable[[], str]):
        self.line, self.temporary = line, temporary
        self.level: dict[str, int] = {}  # register put off -> how many steps it depends on
        self.sources: set[str] = set()  # registers that operations put off read
        self.rows: dict[str, tuple[str, str, int]] = {}  # register -> variable, array, row
        self._heights: dict[str, int] = {}  # rows of each array
        # (level, expression, kind, whether arguments broadcast) -> operations
        self._groups: dict[tuple[int, str, str, bool], list[_Operation]] = {}

    def holds(self, register: str) -> bool:
        """Whether the register is put off or a row: no variable has its value."""
        return register in self.level or register in self.rows

    def put_off(
        self, register: str, name: str, template: str, arguments: tuple[Argument, ...], kind: str,
        broadcasts: bool,
    ) -> None:  # fmt: skip
        """Define `register` = `name` by an expression with {} for each argument, later."""
        level = 1 + max((self.level.get(a.register, 0) for a in arguments), default=0)
        self.level[register] = level
        self.sources.update(a.register for a in arguments if a.register)
        group = self._groups.setdefault((level, template, kind, broadcasts), [])
        group.append(_Operation(register, name, arguments))

    def fetch(self, register: str) -> None:
        """Give the variable of a register its value."""
        if register in self.level:
            self.compute()
        if register in self.rows:
            name, array, row = self.rows.pop(register)
            self.line(f"{name} = {array}[{row}]")

    def changes(self, register: str) -> None:
        """The register is about to get another value."""
        if register in self.sources or register in self.level:
            self.compute()
        self.rows.pop(register, None)

    def compute(self) -> None:
        """Emit everything that is put off."""
        groups, self._groups = sorted(self._groups.items(), key=lambda item: item[0][0]), {}
        self.level.clear()
        self.sources.clear()
        for (_, template, _, broadcasts), operations in groups:
            least = _LEAST_COMPOUND if "(" in template else _LEAST_SIMPLE
            columns = list(zip(*(operation.arguments for operation in operations)))
            alike = [len(set(column)) == 1 for column in columns]
            if len(operations) < least or all(alike):
                self._one_by_one(template, operations)
                continue
            texts = [
                self._single(column[0]) if same and broadcasts else self._stacked(column)
                for column, same in zip(columns, alike)
            ]
            array = self.temporary()
            self.line(f"{array} = {template.format(*texts)}")
            self._heights[array] = len(operations)
            for row, operation in enumerate(operations):
                self.rows[operation.register] = operation.name, array, row

    def _one_by_one(self, template: str, operations: list[_Operation]) -> None:
        for operation in operations:
            texts = [self._single(argument) for argument in operation.arguments]
            self.line(f"{operation.name} = {template.format(*texts)}")

    def _single(self, argument: Argument) -> str:
        if argument.register in self.rows:
            self.fetch(argument.register)
        return argument.name + argument.view

    def _stacked(self, column: tuple[Argument, ...]) -> str:
        """The arguments as rows of one array: of the one they are already, if they are all."""
        places = [self.rows.get(argument.register, ("", "", -1))[1:] for argument in column]
        array = places[0][0]
        if places == [(array, row) for row in range(self._heights.get(array, 0))]:
            return array + column[0].view
        names = [self._single(argument) for argument in column]
        return f"stacked({', '.join(names)})"


def stacked(*values: np.ndarray) -> np.ndarray:
    """Arrays of equal length as rows."""
    return np.concatenate(values).reshape(len(values), -1)
