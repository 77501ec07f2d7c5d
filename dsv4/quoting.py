"""Quotes of foreign values in messages: one printable line of bounded length, whatever the value.

Values and names of callers, files and environments are foreign. Ten thousand characters of one
would bury the message, a line break would fake a second one, an escape sequence would command the
terminal.
"""

from __future__ import annotations

import reprlib

QUOTE = 100
"""Longest quote of a value, in characters."""
LINE = 1000
"""Longest message, in characters."""

_GAP = " ... "


class _Short(reprlib.Repr):
    """Representations that look at six elements of each of three levels of a value.

    Of six levels, the default, they would have 300 kB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = 2 * QUOTE

    def repr_Size(self, shape: tuple[int, ...], level: int) -> str:
        """Of a tensor's shape: that of a tuple."""
        return self.repr_tuple(shape, level)


_SHORT = _Short()


def quoted(value: object, limit: int = QUOTE) -> str:
    """Return a representation of a value: `repr` on one line, shortened in the middle."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # Python prints no integer of more than some thousand digits
        return f"a value that cannot be printed ({printable(type(value).__name__, limit)})"
    return printable(" ".join(text.split()) if "\n" in text else text, limit)


def printable(text: object, limit: int = LINE) -> str:
    """Return a name, path or message with what cannot be printed escaped as `repr` does it,
    shortened in the middle."""
    line = str(text)
    if len(line) > 2 * limit:
        # First, since each character costs time. What is left is still too long.
        line = line[:limit] + "." + line[-limit:]
    if not line.isprintable():
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    if len(line) <= limit:
        return line
    end = (limit - len(_GAP)) // 3
    return line[: limit - len(_GAP) - end] + _GAP + line[-end:]
