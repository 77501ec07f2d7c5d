"""Canonical text of compiled code, and where two texts part.

Two compilations of one kernel differ in names (entries, parameters and globals are called after
modules, classes and argument types) and in line information. The canonical text has neither: what
is left is the code, in its order.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SECTION = re.compile(r"^\s*\.section\b[^{]*\{[^}]*\}", re.MULTILINE)
_LINE_INFO = re.compile(r"^\s*(?:\.loc|\.file)\b[^\n]*$", re.MULTILINE)
_DEBUG_LABEL = re.compile(r"^\s*\$L__(?:tmp|func_begin|func_end|info_string)\w*:", re.MULTILINE)
_TARGET = re.compile(r"^(\s*\.target\s+\w+),\s*debug\b", re.MULTILINE)

_FUNCTION = re.compile(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([A-Za-z_$][\w$]*)")
# A variable, with what may follow its name: an extent, a value, or the end of the declaration.
_VARIABLE = re.compile(
    r"\.(?:param|global|const|shared|local)\b(?:\s+\.?\w+)*?\s+([A-Za-z_$][\w$]*)"
    r"\s*(?:\[[^\]]*\]\s*)*(?=[=;,)\n])"
)
_IDENTIFIER = re.compile(r"(?<![\w$%.])[A-Za-z_$][\w$]*")
_REGISTER_OR_LABEL = re.compile(r"%[A-Za-z]+\d+\b|\$L__BB\d+_\d+")

_HOST_FUNCTION = re.compile(r"^  llvm\.func @cutlass_.*?^  \}$", re.MULTILINE | re.DOTALL)
_HOST_SYMBOL = re.compile(r'@"[^"]*"|@[\w.$]+')
_RUNTIME_SYMBOL = re.compile(r"@(?:_cu|cuda_dialect_|CuteDSLRT_|printf$)")
_LOCATION = re.compile(r"\s*loc\([^\n]*\)$", re.MULTILINE)


def canonical_ptx(ptx: str) -> str:
    """PTX without names of functions, parameters and variables, comments and line information.

    Names are numbered in the order in which they appear. Registers, labels, immediates, directives
    and the order of instructions and functions stay.
    """
    text = _COMMENT.sub("", ptx)
    for pattern in (_SECTION, _LINE_INFO, _DEBUG_LABEL):
        text = pattern.sub("", text)
    text = _TARGET.sub(r"\1", text)
    declared = {match[1] for pattern in (_FUNCTION, _VARIABLE) for match in pattern.finditer(text)}
    number = _numbering("name")
    text = _IDENTIFIER.sub(lambda m: number(m[0]) if m[0] in declared else m[0], text)
    return _tidy(text)


def canonical_host(module: str) -> str:
    """The host function of a compiled module (LLVM dialect) without names and locations.

    It encodes the tensor maps and sets grid, block, cluster and shared memory of the launches, none
    of which PTX has.

    Raises:
        ValueError: no host function in `module`.
    """
    functions = _HOST_FUNCTION.findall(module)
    if not functions:
        raise ValueError("the compiled module has no host function `llvm.func @cutlass_...`")
    text = _LOCATION.sub("", _COMMENT.sub("", "\n".join(functions)))
    number = _numbering("@name")
    text = _HOST_SYMBOL.sub(lambda m: m[0] if _RUNTIME_SYMBOL.match(m[0]) else number(m[0]), text)
    return _tidy(text)


def is_renumbered(before: str, after: str) -> bool:
    """Whether canonical texts differ in nothing but the numbers of registers and labels."""
    return _renumbered(before) == _renumbered(after)


def first_difference(before: str, after: str) -> tuple[int, str, str]:
    """Line number from 1 of the first difference, and both lines; "" past the end of a text."""
    lines = itertools.zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    return next((i, a, b) for i, (a, b) in enumerate(lines, 1) if a != b)


def unified_diff(before: str, after: str, limit: int) -> list[str]:
    """The first `limit` lines of a unified diff with one line of context."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "base", "head", n=1, lineterm=""
    )
    return list(itertools.islice(lines, limit))


def _renumbered(text: str) -> str:
    # The declared counts of registers are numbers of registers as well.
    text = re.sub(r"(%[A-Za-z]+)<\d+>", r"\1<>", text)
    numbers: dict[str, Callable[[str], str]] = {}

    def rename(match: re.Match) -> str:
        kind = match[0].rstrip("0123456789_")
        return numbers.setdefault(kind, _numbering(kind))(match[0])

    return _REGISTER_OR_LABEL.sub(rename, text)


def _numbering(prefix: str) -> Callable[[str], str]:
    """Gives each new name the next number."""
    numbers: dict[str, str] = {}
    return lambda name: numbers.setdefault(name, f"{prefix}{len(numbers)}")


def _tidy(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)
