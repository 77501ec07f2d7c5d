"""The one error of checkpoint reading and writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

from dsv4.quoting import printable, quoted

_NAMED = 4
_BRIEF = 200  # characters of a library's message, or of one problem
_NAME = 80  # and of a name


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file or the tensors.

    The message is one printable line of bounded length: names in a checkpoint are foreign.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


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
            named = ", ".join(printable(name, _BRIEF) for name in names[:_NAMED])
            parts.append(f"{len(names):,} {kind}: {named}{more}")
    if parts:
        raise CheckpointError(f"checkpoint {path}: {'; '.join(parts)}")


def brief(error: BaseException) -> str:
    """Return the start of a library's message: some quote a whole file header, some span lines."""
    line = (str(error) or repr(error)).partition("\n")[0]
    return printable(line, _BRIEF)


def brief_name(name: str) -> str:
    """Return a foreign name, cut to a length that a message can hold."""
    return printable(name, _NAME)


def mis_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return what is wrong with a tensor of another shape, for `refuse`."""
    return f"{brief_name(name)} {quoted(list(found))} instead of {list(wanted)}"
