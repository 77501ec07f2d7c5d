"""Names of nested PTX scopes: registers, vectors of registers, labels and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MEMBERS = {**dict(zip("xyzw", range(4))), **dict(zip("rgba", range(4)))}
_NAME = re.compile(r"(?<![\w%$.])(?:%[\w$]+|[A-Za-z_$][\w$]*)(?:\.[xyzwrgba](?!\w))?")


@dataclass
class Scope:
    """Meaning of the names declared between two braces.

    Attributes:
        names: registers, labels and parameters.
        vectors: registers of each vector.
        families: `%r<10>` declares %r0 to %r9: what stands before the number, by prefix.
        closed: whether names of the scopes around it are out of sight (the body of a function).
    """

    names: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, list[str]] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    closed: bool = False

    def find(self, name: str) -> str | None:
        """What a name, or a member of a vector, stands for; None if it is not declared here."""
        if name in self.names:
            return self.names[name]
        if name in self.vectors:
            return "{" + ", ".join(self.vectors[name]) + "}"
        stem, _, member = name.partition(".")
        if member:
            return self.vectors[stem][_MEMBERS[member]] if stem in self.vectors else None
        prefix = name.rstrip("0123456789")
        if prefix != name and prefix in self.families:
            return self.families[prefix] + name[len(prefix) :]
        return None


class Scopes:
    """The scopes around the statement that is being read, outermost first."""

    def __init__(self) -> None:
        self.open: list[Scope] = [Scope()]
        self.count = 0

    def find(self, name: str) -> str:
        """What a name stands for; itself where no scope declares it."""
        for scope in reversed(self.open):
            found = scope.find(name)
            if found is not None:
                return found
            if scope.closed:
                break
        return name

    def rename(self, operands: str) -> str:
        """Operands with every declared name replaced by what it stands for."""
        return _NAME.sub(lambda match: self.find(match.group(0)), operands)

    def unique(self, name: str, sigil: str = "%") -> str:
        """A name that no other scope uses."""
        self.count += 1
        return f"{sigil}s{self.count}_{name.lstrip('%$')}"
