"""Deleting or weakening the synchronisation of a compiled kernel: does the simulator notice?"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import mock

from dsv4.simulator import Report, SimulatorError
from dsv4.simulator.api import Simulation
from dsv4.simulator.compile.codegen import is_sync
from dsv4.simulator.errors import Deadlock, Endless, KernelFault
from dsv4.simulator.frontend.cutedsl import HostRunner
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.parser import Module, parse_module
from dsv4.simulator.races.findings import Findings
from dsv4.testing.harness import Call

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


def run_of(make: Callable[[], Call], check: Callable[[tuple, dict], None], schedule: str) -> Run:
    """A launch of a call, whose tensors are new each time; `check` asserts that outputs among its
    positional and keyword arguments are right."""

    def prepare() -> tuple[tuple, dict]:
        call = make().to("cpu").poisoned()
        return call.args, call.options

    def correct(positional: tuple, keywords: dict) -> bool:
        try:
            check(positional, keywords)
        except AssertionError:
            return False
        return True

    return Run(prepare, correct, schedule)


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


_SCOPES = ("cta", "cluster", "gpu", "sys")
_WEAKER = {
    "sc": ("acq_rel",), "acq_rel": ("release", "acquire"), "release": ("relaxed",),
    "acquire": ("relaxed",),
}  # fmt: skip
_OTHER_PROXIES = {
    "fence.proxy.async": ("fence.proxy.async.shared::cta", "fence.proxy.async.global"),
    "fence.proxy.async.shared::cta": ("fence.proxy.async.global",),
    "fence.proxy.async.shared::cluster": ("fence.proxy.async.global",),
    "fence.proxy.async.global": ("fence.proxy.async.shared::cta",),
}


def weakenings(ins: Instruction) -> list[str]:
    """The opcode with one qualifier weakened by one step, each way: semantics, scope, the proxy
    that a fence is for, a wait for writes that becomes one for reads."""
    if ins.opcode in _OTHER_PROXIES:
        return list(_OTHER_PROXIES[ins.opcode])
    if ins.opcode == "cp.async.bulk.wait_group":
        return [ins.opcode + ".read"]
    if not ins.order.strong:
        return []
    parts = _explicit(ins)
    out = []
    for i, part in enumerate(parts):
        out += [_joined(parts, i, weaker) for weaker in _WEAKER.get(part, ())]
        if part in _SCOPES[1:]:
            out.append(_joined(parts, i, _SCOPES[_SCOPES.index(part) - 1]))
    if parts[:2] == ["barrier", "cluster"]:
        # Its scope is its name, and only its arrival can be relaxed.
        return ["barrier.cluster.arrive.relaxed"] if "release" in parts else []
    if parts[0] == "mbarrier" and "shared::cluster" not in parts:
        # Most of these are handed over within a CTA; between CTAs, it is the arrival that tells.
        out = [opcode for opcode in out if ".relaxed" in opcode]
    return out


def weakened_instructions(ptx: str) -> list[tuple[Instruction, str]]:
    """Every way to weaken one instruction of any entry: the instruction and its new opcode."""
    return [
        (ins, opcode)
        for entry in parse_module(ptx).entries.values()
        for ins in entry.instructions
        for opcode in weakenings(ins)
    ]


def _explicit(ins: Instruction) -> list[str]:
    """The parts of an opcode with its default semantics and scope written out."""
    parts = list(ins.parts)
    if parts[0] in ("mbarrier", "atom", "red", "barrier"):
        semantics = next((p for p in parts if p in ("relaxed", *_WEAKER)), None)
        scope = next((p for p in parts[1:] if p in _SCOPES), ins.order.scope.name.lower())
        if semantics is None:
            semantics = "release" if ins.order.releases else "relaxed"
            semantics = "acquire" if ins.order.acquires else semantics
        plain = [p for p in parts if p not in (semantics, scope)]
        if parts[:2] == ["barrier", "cluster"]:
            return [*parts[:3], semantics]
        at = next(i for i, p in enumerate(plain) if p.startswith(("shared", "global", "b64")))
        return [*plain[:at], semantics, scope, *plain[at:]]
    return parts


def _joined(parts: list[str], i: int, replacement: str) -> str:
    return ".".join([*parts[:i], replacement, *parts[i + 1 :]])


def weakened(ptx: str, ins: Instruction, opcode: str) -> str:
    """The module with another opcode for one instruction."""
    lines = ptx.split("\n")
    line = lines[ins.ptx_line - 1]
    changed = re.sub(re.escape(ins.opcode) + r"(?=[\s;])", opcode, line, count=1)
    assert changed != line, f"cannot weaken {ins.where()}"
    lines[ins.ptx_line - 1] = changed
    return "\n".join(lines)


# Launches of these tests run a small part of it; by default an endless change takes half an hour.
INSTRUCTIONS_PER_WARP = 2_000_000
_hosts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _host(compiled, module: Module, multiprocessors: int) -> HostRunner:
    """The host code of a compiled function, prepared once: it is the same for every change."""
    if compiled not in _hosts:
        _hosts[compiled] = HostRunner(compiled, module, multiprocessors)
    _hosts[compiled].module = module
    return _hosts[compiled]


def simulate_text(compiled, ptx: str, run: Run) -> tuple[Report, bool]:
    """Run a changed module under the compiled host function; the report, and if it was right."""
    return _simulate(changed_simulation(compiled, ptx), run)


def changed_simulation(compiled, ptx: str) -> Simulation:
    """The simulation of a compiled function with another PTX of the same kernels."""
    return Simulation(parse_module(ptx), functools.partial(_host, compiled))


def _simulate(simulation: Simulation, run: Run) -> tuple[Report, bool]:
    positional, keywords = run.prepare()
    report = simulation.run(
        positional, keywords, (), run.schedule, run.seed,
        instructions_per_warp=INSTRUCTIONS_PER_WARP,
    )  # fmt: skip
    return report, run.correct(positional, keywords)


class _Raced(SimulatorError):
    """The first race of a launch, by kind: the rest of the launch need not run."""


def _end(findings: Findings, kind: str, message: str, key: tuple, places: tuple) -> None:
    raise _Raced(kind)


def checked(compiled, run: Run) -> Report:
    """The report of an unchanged launch, which must be free of races and right."""
    report, correct = simulate_text(compiled, compiled.artifacts.PTX, run)
    report.raise_if_racy()
    assert correct, f"wrong before anything was deleted: {run}"
    return report


def known_warnings(compiled, runs: Iterable[Run]) -> set[tuple]:
    """Warnings of unchanged launches, which must be free of races and right."""
    return {key_of(finding) for run in runs for finding in checked(compiled, run).warnings}


def noticed(compiled, text: str, runs: Iterable[Run], known: set[tuple]) -> str:
    """How the first run that notices a change of the PTX does so; "" if none does.

    A change that the simulator refuses is an error: what it cannot run, it cannot have noticed.
    """
    simulation = changed_simulation(compiled, text)
    for run in runs:
        try:
            with mock.patch.object(Findings, "report", _end):
                report, correct = _simulate(simulation, run)
        except _Raced as race:
            return str(race)
        except (KernelFault, Deadlock, Endless) as error:
            return type(error).__name__
        if not correct:
            return "wrong result"
        new = [f.kind for f in report.warnings if key_of(f) not in known]
        if new:
            return new[0]
    return ""


def key_of(finding) -> tuple:
    """A finding, in whatever changed PTX."""
    # Line numbers of the PTX stay the same, its text may not.
    return finding.kind, tuple(re.sub("`.*`", "", place) for place in finding.places)
