"""Weaker qualifiers of a compiled kernel: every way to weaken one by a step, and which of them
nothing notices.

A weaker qualifier changes no value here, where memory is sequentially consistent: it is the
checker's order that changes, in every schedule alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.parser import parse_module
from tests.simulator.helpers.mutations import (
    Run,
    known_warnings,
    noticed,
    simulate_text,
    weakened,
    weakened_instructions,
)
from tests.simulator.helpers.places import places

Place = tuple[str, str, str]  # stem, the kernel's function, new qualifier


class Weakening(NamedTuple):
    """An instruction with a weaker qualifier."""

    ins: Instruction
    opcode: str
    place: Place

    def __str__(self) -> str:
        return f"{self.opcode}: {self.ins.where()}"


def weakenings_of(ptx: str) -> list[Weakening]:
    """All of a module."""
    changes = weakened_instructions(ptx)
    placed = places([ins for ins, _ in changes])
    return [
        Weakening(
            ins, opcode, (*place, next(p for p in opcode.split(".") if p not in _qualifiers(ins)))
        )
        for (ins, opcode), place in zip(changes, placed)
    ]


def _qualifiers(ins: Instruction) -> set[str]:
    """The parts of an opcode and what it has by default."""
    semantics = {"acquire"} if ins.order.acquires else set()
    semantics |= {"release"} if ins.order.releases else set()
    if ins.order.strong and len(semantics) != 1:
        semantics = set() if semantics else {"relaxed"}
    return {*ins.parts, ins.order.scope.name.lower(), *semantics}


class Reached(NamedTuple):
    """What each launch runs: lines of the PTX of the entries it reaches, and which
    synchronisation it never runs there."""

    run: Run
    lines: frozenset[int]
    never: frozenset[str]


def reached(compiled, runs: Iterable[Run]) -> list[Reached]:
    """What unchanged launches run."""
    ptx = compiled.artifacts.PTX
    entries = parse_module(ptx).entries
    found = []
    for run in runs:
        report, _ = simulate_text(compiled, ptx, run)
        ran = [c for c in report.coverage if c.sync_run]
        lines = (ins.ptx_line for c in ran for ins in entries[c.kernel].instructions)
        never = (where for c in ran for where in c.missed_sync)
        found.append(Reached(run, frozenset(lines), frozenset(never)))
    return found


NEVER = "never run"


def tried(compiled, runs: Sequence[Run]) -> Iterator[tuple[Weakening, str]]:
    """Each weakening in the entries that the launches reach, and how it is noticed: "" if not,
    `NEVER` if no launch runs the instruction."""
    ptx = compiled.artifacts.PTX
    launches = reached(compiled, runs)
    known = known_warnings(compiled, runs)
    for weakening in weakenings_of(ptx):
        ins = weakening.ins
        those = [found for found in launches if ins.ptx_line in found.lines]
        running = [found.run for found in those if ins.where() not in found.never]
        if running:
            text = weakened(ptx, ins, weakening.opcode)
            yield weakening, noticed(compiled, text, running, known)
        elif those:
            yield weakening, NEVER


def check_weaker(
    compiled,
    runs: Sequence[Run],
    harmless: Mapping[Place, tuple[int, str]],
    unreached: Mapping[Place, tuple[int, str]] | None = None,
) -> None:
    """Fail unless exactly the listed weakenings go unnoticed, and exactly the listed ones are of
    instructions that no launch runs: place -> how many, and why."""
    found = list(tried(compiled, runs))
    for how, listed in (("", harmless), (NEVER, unreached or {})):
        missed = [weakening for weakening, noticed_as in found if noticed_as == how]
        expected = {place: count for place, (count, _) in listed.items()}
        assert Counter(w.place for w in missed) == expected, "\n".join(map(str, missed))
