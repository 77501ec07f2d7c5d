"""Device functions of a PTX module, which calls are replaced by."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.symbols import Symbol
from dsv4.simulator.ptx.types import TYPE_BITS

_FUNCTION = re.compile(r"\.func\s*(?:\(([^()]*)\)\s*)?([\w$]+)\s*(?:\(([^()]*)\))?([^{;]*)([{;])")
_FORMAL = re.compile(
    r"\.(reg|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s.*?)?([%\w$]+)(?:\[(\d*)\])?$",
    flags=re.S,
)
_CALL = re.compile(r"(?:\(([^()]*)\)\s*,\s*)?([%\w$]+)\s*(?:,\s*\(([^()]*)\))?\s*(?:,\s*(\S+))?$")


@dataclass(frozen=True)
class Parameter:
    """A formal parameter or result of a function.

    Attributes:
        register: the type of one that is passed in a register, otherwise None.
        align, size: bytes of one that is passed in parameter space.
    """

    name: str
    register: str | None
    align: int
    size: int

    def variable(self, name: str) -> Symbol:
        """The memory that it is passed in, under a name of the call."""
        return Symbol(name, "local", self.align, self.size)


@dataclass(frozen=True)
class Function:
    """A device function with a body; `body` is the position of its first brace."""

    name: str
    results: tuple[Parameter, ...]
    parameters: tuple[Parameter, ...]
    body: int


@dataclass(frozen=True)
class Call:
    """`call (results), function, (arguments)`."""

    results: tuple[str, ...]
    function: str
    arguments: tuple[str, ...]


def functions_of(text: str) -> dict[str, Function]:
    """The functions that a module defines, by name."""
    found = {}
    for match in _FUNCTION.finditer(text):
        results, name, formals, _, end = match.groups()
        if end == "{":
            found[name] = Function(name, _formals(results), _formals(formals), match.end() - 1)
    return found


def _formals(text: str | None) -> tuple[Parameter, ...]:
    declared = [part.strip() for part in (text or "").split(",")]
    return tuple(parameter(part) for part in declared if part)


def parameter(declaration: str) -> Parameter:
    """A declared parameter; UnsupportedInstruction for what is none."""
    match = _FORMAL.match(declaration.strip())
    if match is None or match.group(3) not in TYPE_BITS or match.group(5) == "":
        raise UnsupportedInstruction(f"parameter `{declaration.strip()}` is not simulated")
    how, align, kind, name, count = match.groups()
    unit = max(TYPE_BITS[kind] // 8, 1)
    register = kind if how == "reg" else None
    return Parameter(name, register, int(align or unit), unit * int(count or 1))


def call_of(operands: str) -> Call | None:
    """The call that operands of `call` describe; None for one through a register."""
    match = _CALL.match(operands.strip())
    if match is None or match.group(2).startswith("%"):
        return None
    results, name, arguments, _ = match.groups()
    given = tuple(
        tuple(part.strip() for part in (text or "").split(",") if part.strip())
        for text in (results, arguments)
    )
    return Call(given[0], name, given[1])
