"""Deleting synchronisation from a compiled kernel, and asking whether the simulator notices."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsv4.simulator import Report, SimulatorError
from dsv4.simulator.api import Simulation
from dsv4.simulator.codegen import is_sync
from dsv4.simulator.host import HostRunner
from dsv4.simulator.ptx.parser import Instruction, Module, parse_module

# Work, not order: without these the result is wrong, which is not the checker's business.
_WORK = ("tcgen05.mma", "wgmma.mma", "tcgen05.ld", "tcgen05.st", "cp.async.bulk.tensor",
         "mbarrier.init", "tcgen05.relinquish")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One launch of a kernel: its arguments, made anew each time, and whether they came out right.

    `prepare()` gives positional and keyword arguments; `correct(positional, keywords)` judges the
    outputs among them.
    """

    prepare: Callable[[], tuple[tuple, dict]]
    correct: Callable[[tuple, dict], bool] = lambda positional, keywords: True
    schedule: str = "eager"
    seed: int = 0


def sync_instructions(ptx: str) -> list[Instruction]:
    """Waits, arrivals, fences, commits and barriers of all entries."""
    return [
        i
        for entry in parse_module(ptx).entries.values()
        for i in entry.instructions
        if is_sync(i.opcode) and not i.opcode.startswith(_WORK)
    ]


def without(ptx: str, ins: Instruction) -> str:
    """The module without one instruction; a wait succeeds at once."""
    lines = ptx.split("\n")
    line = lines[ins.ptx_line - 1]
    opcode = re.escape(ins.opcode)
    if "_wait.parity" in ins.opcode:
        changed = re.sub(opcode + r"\s+(\S+), .*?;", r"setp.eq.u32 \1, 0, 0;", line, count=1)
    else:
        changed = re.sub(r"(@!?\S+\s+)?" + opcode + r"[^;]*;", "", line, count=1)
    assert changed != line, f"cannot delete {ins.where()}"
    lines[ins.ptx_line - 1] = changed
    return "\n".join(lines)


_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _host(compiled, module: Module, multiprocessors: int) -> HostRunner:
    """The host code of a compiled function, prepared once: it is the same for every change."""
    if compiled not in _hosts:
        _hosts[compiled] = HostRunner(compiled, module, multiprocessors)
    _hosts[compiled].module = module
    return _hosts[compiled]


def simulate_text(compiled, ptx: str, run: Run) -> tuple[Report, bool]:
    """Run a changed module under the compiled host function; the report, and if it was right."""
    simulation = Simulation(parse_module(ptx), functools.partial(_host, compiled))
    positional, keywords = run.prepare()
    report = simulation.run(positional, keywords, (), run.schedule, run.seed)
    return report, run.correct(positional, keywords)


def known_warnings(compiled, runs: Iterable[Run]) -> set[tuple]:
    """Warnings of the unchanged kernel, which must be free of races and right."""
    known = set()
    for run in runs:
        report, correct = simulate_text(compiled, compiled.artifacts.PTX, run)
        report.raise_if_racy()
        assert correct, f"wrong before anything was deleted: {run}"
        known |= {_key(finding) for finding in report.warnings}
    return known


def noticed(compiled, ins: Instruction, runs: Iterable[Run], known: set[tuple]) -> str:
    """How the first run that notices the deletion does so; "" if none does."""
    text = without(compiled.artifacts.PTX, ins)
    for run in runs:
        try:
            report, correct = simulate_text(compiled, text, run)
        except SimulatorError as error:
            return type(error).__name__
        if report.races:
            return report.races[0].kind
        if not correct:
            return "wrong result"
        new = [f.kind for f in report.warnings if _key(f) not in known]
        if new:
            return new[0]
    return ""


def _key(finding) -> tuple:
    # Line numbers of the PTX stay the same, its text may not.
    return finding.kind, tuple(re.sub("`.*`", "", place) for place in finding.places)
