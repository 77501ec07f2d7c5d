"""The one error of checkpoint reading and writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

_NAMED = 4
_BRIEF = 200


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file or the tensors."""


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
            parts.append(f"{len(names):,} {kind}: {', '.join(names[:_NAMED])}{more}")
    if parts:
        raise CheckpointError(f"checkpoint {path}: {'; '.join(parts)}")


def brief(error: Exception) -> str:
    """Return the start of a library's message: some quote a whole file header, some span lines."""
    line = (str(error) or repr(error)).partition("\n")[0]
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF]} ..."
