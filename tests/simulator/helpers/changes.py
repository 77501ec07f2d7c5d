"""Changes of a compiled kernel: every deletion of its synchronisation, every way to weaken a
qualifier by a step, and which of them nothing notices.

A weaker qualifier changes no value here, where memory is sequentially consistent: it is the
checker's order that changes, in every schedule alike.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.parser import parse_module
from tests.simulator.helpers.mutations import (
    Run,
    changed_simulation,
    checked,
    key_of,
    noticed,
    sync_instructions,
    weakened,
    weakened_instructions,
    without,
)
from tests.simulator.helpers.places import places

Place = tuple[str, ...]  # stem, the kernel's function, the new qualifier if there is one
Listed = Mapping[Place, tuple[int, str]]  # place -> how many, and why
NEVER = "never run"
# Processes that share a table: thousands of launches, hours on one core.
WORKERS = "DSV4_TABLE_WORKERS"


class Change(NamedTuple):
    """An instruction, and the weaker opcode that it gets; "" deletes it."""

    ins: Instruction
    opcode: str
    place: Place

    def applied(self, ptx: str) -> str:
        """The module with it."""
        return weakened(ptx, self.ins, self.opcode) if self.opcode else without(ptx, self.ins)

    def __str__(self) -> str:
        return f"{self.opcode or 'deleted'}: {self.ins.where()}"


def deletions_of(ptx: str) -> list[Change]:
    """All of a module: waits, arrivals, fences, commits and barriers."""
    found = sync_instructions(ptx)
    return [Change(ins, "", place) for ins, place in zip(found, places(found))]


def weakenings_of(ptx: str) -> list[Change]:
    """All of a module."""
    found = weakened_instructions(ptx)
    placed = places([ins for ins, _ in found])
    return [
        Change(
            ins, opcode, (*place, next(p for p in opcode.split(".") if p not in _qualifiers(ins)))
        )
        for (ins, opcode), place in zip(found, placed)
    ]


def in_entries(ptx: str, names: Iterable[str], changes: Iterable[Change]) -> list[Change]:
    """The changes of a module's entries whose names have one of these parts, as all have ""."""
    entries = parse_module(ptx).entries
    own = [entry for key, entry in entries.items() if any(name in key for name in names)]
    lines = {ins.ptx_line for entry in own for ins in entry.instructions}
    return [change for change in changes if change.ins.ptx_line in lines]


def _qualifiers(ins: Instruction) -> set[str]:
    """The parts of an opcode and what it has by default."""
    semantics = {"acquire"} if ins.order.acquires else set()
    semantics |= {"release"} if ins.order.releases else set()
    if ins.order.strong and len(semantics) != 1:
        semantics = set() if semantics else {"relaxed"}
    return {*ins.parts, ins.order.scope.name.lower(), *semantics}


class Reached(NamedTuple):
    """What an unchanged launch runs and says.

    Attributes:
        lines: of the PTX of the entries that it reaches.
        never: which synchronisation it never runs there.
        warnings: keys of them.
        seconds: how long it takes.
    """

    run: Run
    lines: frozenset[int]
    never: frozenset[str]
    warnings: frozenset[tuple]
    seconds: float


def reached(compiled, runs: Sequence[Run]) -> list[Reached]:
    """What unchanged launches run, which must be free of races and right; the shortest one first,
    since most changes are noticed by any."""
    ptx = compiled.artifacts.PTX
    entries = parse_module(ptx).entries
    changed_simulation(compiled, ptx)  # its host code is prepared once, for all processes

    def of_run(run: Run) -> tuple[frozenset[int], frozenset[str], frozenset[tuple], float]:
        start = time.perf_counter()
        report = checked(compiled, run)
        # Counts add up over the launches of an entry: the last one's are of all.
        ran = [c for c in {c.kernel: c for c in report.coverage}.values() if c.sync_run]
        return (
            frozenset(ins.ptx_line for c in ran for ins in entries[c.kernel].instructions),
            frozenset(where for c in ran for where in c.missed_sync),
            frozenset(map(key_of, report.warnings)),
            time.perf_counter() - start,
        )

    found = [Reached(run, *of) for run, of in shared_out(of_run, list(runs))]
    return sorted(found, key=lambda launch: launch.seconds)


def tried(compiled, runs: Sequence[Run], changes: Iterable[Change]) -> Iterator[tuple[Change, str]]:
    """Each change in the entries that the launches reach, and how it is noticed: "" if not,
    `NEVER` if no launch runs the instruction."""
    ptx = compiled.artifacts.PTX
    launches = reached(compiled, runs)
    known = {key for launch in launches for key in launch.warnings}

    def of_change(change: Change) -> str | None:
        those = [found for found in launches if change.ins.ptx_line in found.lines]
        running = [found.run for found in those if change.ins.where() not in found.never]
        if running:
            return noticed(compiled, change.applied(ptx), running, known)
        return NEVER if those else None

    for change, how in shared_out(of_change, list(changes)):
        if how is not None:
            yield change, how


def shared_out(function: Callable, items: Sequence) -> Iterator[tuple]:
    """Each item and what a function gives for it, in order of completion, by forked processes:
    a compiled kernel cannot be sent to any."""
    workers = min(int(os.environ.get(WORKERS, "1")), len(items))
    if workers <= 1:
        yield from ((item, function(item)) for item in items)
        return
    context = multiprocessing.get_context("fork")
    taken, done = context.Value("i", 0), context.SimpleQueue()

    def take() -> int:
        with taken.get_lock():
            taken.value += 1
            return taken.value - 1

    def work() -> None:
        # Torch's threads do not survive a fork: a worker would wait for them for ever.
        torch.set_num_threads(1)
        while (i := take()) < len(items):
            try:
                done.put((i, function(items[i]), None))
            except BaseException as error:
                done.put((i, None, f"{type(error).__name__}: {error}"))

    processes = [context.Process(target=work, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        for _ in items:
            i, result, error = done.get()
            if error is not None:
                raise RuntimeError(f"{items[i]}: {error}")
            yield items[i], result
    finally:
        for process in processes:
            process.terminate()


def check_weaker(
    compiled,
    runs: Sequence[Run],
    harmless: Listed,
    unreached: Listed | None = None,
    entries: Iterable[str] = ("",),
) -> None:
    """Fail unless exactly the listed weakenings go unnoticed, and exactly the listed ones are of
    instructions that no launch runs. Of `entries`, as `in_entries` names them."""
    ptx = compiled.artifacts.PTX
    check(compiled, runs, in_entries(ptx, entries, weakenings_of(ptx)), harmless, unreached or {})


def check_deleted(
    compiled,
    runs: Sequence[Run],
    redundant: Listed,
    unreached: Listed | None = None,
    entries: Iterable[str] = ("",),
) -> None:
    """Fail unless exactly the listed deletions go unnoticed, and exactly the listed ones are of
    instructions that no launch runs. Of `entries`, as `in_entries` names them."""
    ptx = compiled.artifacts.PTX
    check(compiled, runs, in_entries(ptx, entries, deletions_of(ptx)), redundant, unreached or {})


def check(
    compiled, runs: Sequence[Run], changes: Iterable[Change], harmless: Listed, unreached: Listed
) -> None:
    """Fail unless exactly the listed changes go unnoticed, and exactly the listed ones are of
    instructions that no launch runs."""
    found = list(tried(compiled, runs, changes))
    for how, listed in (("", harmless), (NEVER, unreached)):
        missed = [change for change, noticed_as in found if noticed_as == how]
        expected = {place: count for place, (count, _) in listed.items()}
        assert Counter(change.place for change in missed) == expected, "\n".join(map(str, missed))
