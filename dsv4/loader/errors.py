"""The one error of checkpoint reading and writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

_NAMED = 4
_BRIEF = 200
_NAME = 120


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file or the tensors.

    The message is one printable line. Names in a checkpoint are foreign: a line break or an escape
    sequence in one would otherwise reach logs and terminals.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return the text with every character that cannot be printed escaped, as repr() does."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def refuse(path: str | PathLike[str], problems: Mapping[str, Sequence[str]]) -> None:
    """Raise one `CheckpointError` that lists every kind of problem; none = return.

    Args:
        path: what the problems are with.
        problems: kind ("missing tensors") -> the tensors concerned; the first few are named.
    """
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            named = ", ".join(brief_name(name) for name in names[:_NAMED])
            parts.append(f"{len(names):,} {kind}: {named}{more}")
    if parts:
        raise CheckpointError(f"checkpoint {path}: {'; '.join(parts)}")


def brief(error: BaseException) -> str:
    """Return the start of a library's message: some quote a whole file header, some span lines."""
    line = (str(error) or repr(error)).partition("\n")[0]
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF]} ..."


def brief_name(name: str) -> str:
    """Return a foreign name, cut to a length that a message can hold."""
    return name if len(name) <= _NAME else f"{name[:_NAME]}..."
