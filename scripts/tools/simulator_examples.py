#!/usr/bin/env python3
"""Runs kernels of others, unmodified, in the simulator, and records which of them are right.

    scripts/tools/simulator_examples.py nvidia CUTLASS              # every case, one process each
    scripts/tools/simulator_examples.py nvidia CUTLASS mla-fp8 fmha # some of them
    scripts/tools/simulator_examples.py quack SITE --record 0.6.5   # keep the outcomes
    scripts/tools/simulator_examples.py quack SITE --record 0.6.5 --missing --jobs 12
    scripts/tools/simulator_examples.py --page                      # write the page from them

The first argument is a source of kernels: a file of scripts/tools/simulator_cases. The second is
the folder that Python imports it from: a clone of github.com/NVIDIA/cutlass for `nvidia`, where
their wheels are installed (`pip install --target`) for others. Examples check their own outputs;
where a source is a library, the script beside its file makes inputs and compares with PyTorch.
"cuda" tensors stay on the CPU and a launch is a simulation under the race checker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("simulator_cases")
RECORD = ROOT / "tests" / "recorded" / "simulator_examples.json"
PAGE = ROOT / "docs" / "simulator_examples.md"
SECONDS = 1800  # for one case
RIGHT, REFUSED, FAILED = "right", "refused", "failed"
SHOWN = 300  # characters of what a refusal or failure says

# Kinds of findings that end a simulation.
_ENDS = ("unsupported instruction", "kernel fault", "deadlock", "endless", "simulator error")

HEADER = """# Kernels of others in the simulator

Written by `scripts/tools/simulator_examples.py --page` from
`tests/recorded/simulator_examples.json`; do not edit by hand. Each case is a program of others,
unmodified, or a call of a library's public function. `right`: its outputs are what PyTorch
computes. `refused` names the instruction that is not simulated. Every launch runs under the race
checker; what that says of code that is right on a GPU is a rule of PTX that the code leaves to the
hardware or the assembler. CuTeDSL's libraries for CUDA 12 compiled some of NVIDIA's cases, those
for CUDA 13 the others, whose code of three more GEMMs for Hopper lacks `wgmma.fence`.

"""


@dataclass(frozen=True)
class Source:
    """Kernels of one origin.

    Attributes:
        title: for people.
        root: the folder that scripts and imports are relative to, below the given one.
        plain: whether the script simulates by itself, instead of believing in a GPU.
    """

    name: str
    title: str
    root: str
    plain: bool
    cases: dict[str, Case]


@dataclass(frozen=True)
class Case:
    """One program with the arguments of a size that simulates within minutes.

    Attributes:
        path: below the source's root; without one, the script beside the source's file.
    """

    path: str = ""
    arguments: str = ""
    arch: str = "sm_100a"


@dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        status: "right" if its outputs are; "refused" if the simulator lacks something; "failed".
        findings: of the race checker, by kind.
        covered: whether its launches reached every synchronisation.
    """

    status: str
    message: str = ""
    findings: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    warp_instructions: int = 0
    covered: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        what = f": {self.message}" if self.message else ""
        size = f"{self.launches} launches, {self.warp_instructions:,} warp instructions"
        return f"{self.status} ({size}, {self.seconds:.0f} s){what}; {found_in(self.findings)}"


def sources() -> dict[str, Source]:
    """Every source, by name."""
    found = {}
    for path in sorted(CASES.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        about = table.pop("source")
        cases = {name: Case(**fields) for name, fields in table.items()}
        plain = about.get("runner", "sim run") == "python"
        found[path.stem] = Source(path.stem, about["title"], about.get("root", ""), plain, cases)
    return found


def run_case(source: Source, folder: Path, name: str, limit: float = SECONDS) -> Outcome:
    """Run a case in a process of its own."""
    case, root = source.cases[name], (folder / source.root).resolve()
    script = root / case.path if case.path else CASES / f"{source.name}_cases.py"
    runner = [] if source.plain else ["-m", "dsv4", "sim", "run"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        options = ["--arch", case.arch, "--json", str(report)]
        rest = [*options, str(script), *case.arguments.split()]
        if source.plain:
            rest = [str(script), *case.arguments.split(), *options]
        paths = [str(ROOT), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *runner, *rest],
                capture_output=True, text=True, check=False, timeout=limit, cwd=scratch,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(FAILED, f"not done after {limit:.0f} s")
        seconds = round(time.perf_counter() - start, 1)
        said = json.loads(report.read_text()) if report.is_file() else None
    outcome = _outcome(done, said, seconds)
    # What a folder is called says nothing to others.
    return replace(outcome, message=outcome.message.replace(f"{root}/", "")[:SHOWN])


def _run_all(
    source: Source, folder: Path, names: list[str], limit: float, jobs: int
) -> Iterator[tuple[str, Outcome]]:
    """Outcomes as they come, of `jobs` cases at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_case, source, folder, name, limit): name for name in names}
        for ended in as_completed(running):
            yield running[ended], ended.result()


def _outcome(done: subprocess.CompletedProcess, said: dict | None, seconds: float) -> Outcome:
    """The outcome of a command that ended."""
    last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
    if said is None:
        return Outcome(FAILED, last[0][:SHOWN], seconds=seconds)
    launches = said["launches"]
    kinds = Counter(found["kind"] for found in said["findings"])
    size = {
        "findings": {kind: kinds[kind] for kind in sorted(kinds) if kind not in _ENDS},
        "launches": len(launches),
        "warp_instructions": sum(launch["warp_instructions"] for launch in launches),
        "covered": not said["synchronisation_never_reached"],
        "seconds": seconds,
    }
    for found in said["findings"]:
        if found["kind"] in _ENDS:
            status = REFUSED if found["kind"] == _ENDS[0] else FAILED
            return Outcome(status, f"{found['kind']}: {found['message']}", **size)
    errors = [line for line in done.stderr.splitlines() if line[:1].strip()]
    if "Traceback (most recent call last):" in errors:
        return Outcome(FAILED, (errors or last)[-1][:SHOWN], **size)
    return Outcome(RIGHT, **size)


def recorded() -> dict[str, dict]:
    """What is on record, by source."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def keep(source: Source, version: str, outcomes: dict[str, Outcome]) -> None:
    """Put outcomes on record, beside those of cases that there still are."""
    known = recorded()
    before = known.get(source.name, {}).get("cases", {})
    cases = {name: before[name] for name in source.cases if name in before}
    cases |= {name: asdict(outcome) for name, outcome in outcomes.items()}
    known[source.name] = {"version": version, "date": date.today().isoformat(), "cases": cases}
    RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def page(known: dict[str, dict]) -> str:
    """docs/simulator_examples.md."""
    listed = [source for source in sources().values() if source.name in known]
    lines = [HEADER, *_rows(("source", "version", "tried", RIGHT, REFUSED, FAILED, "no finding"))]
    for source in listed:
        cases = known[source.name]["cases"]
        counts = Counter(outcome["status"] for outcome in cases.values())
        clean = sum(not outcome["findings"] for outcome in cases.values())
        numbers = (len(cases), *(counts[s] for s in (RIGHT, REFUSED, FAILED)), clean)
        lines += _rows((source.title, known[source.name]["version"], *numbers), head=False)
    for source in listed:
        lines += [f"\n## {source.title}\n\n"]
        lines += _rows(("case", "GPU", "outcome", "findings", "warp instructions", "coverage"))
        for name, outcome in known[source.name]["cases"].items():
            message = f": {outcome['message']}" if outcome["message"] else ""
            said = " ".join(f"{outcome['status']}{message}".split()).replace("|", "\\|")
            reached = "all" if outcome["covered"] else "part"
            instructions = f"{outcome['warp_instructions']:,}"
            case = source.cases[name]
            found = found_in(outcome["findings"])
            lines += _rows((name, case.arch, said, found, instructions, reached), head=False)
    return "".join(lines)


def found_in(findings: dict[str, int]) -> str:
    """Findings by kind, as text."""
    return ", ".join(f"{count} {kind}" for kind, count in findings.items()) or "none"


def _rows(cells: Iterable[object], head: bool = True) -> list[str]:
    cells = list(map(str, cells))
    line = f"| {' | '.join(cells)} |\n"
    return [line, f"|{'---|' * len(cells)}\n"] if head else [line]


def main() -> int:
    """Command line."""
    known = sources()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", choices=known, help=", ".join(known))
    parser.add_argument("folder", nargs="?", type=Path, help="where Python finds it")
    parser.add_argument("cases", nargs="*", metavar="case")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds for one case")
    parser.add_argument("--record", metavar="VERSION", help="keep the outcomes, of this version")
    parser.add_argument("--missing", action="store_true", help="only cases that are not on record")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--page", action="store_true", help="rewrite the page from the record")
    options = parser.parse_args()
    failed = 0
    if options.source:
        source = known[options.source]
        if options.folder is None or not (options.folder / source.root).is_dir():
            parser.error(f"FOLDER: got {options.folder}, needs a folder with {source.root or '.'}")
        unknown = set(options.cases) - set(source.cases)
        if unknown:
            parser.error(f"no case {', '.join(sorted(unknown))}; known: {', '.join(source.cases)}")
        if options.jobs < 1:
            parser.error(f"--jobs: got {options.jobs}, needs at least 1")
        done = recorded().get(source.name, {}).get("cases", {}) if options.missing else {}
        names = [name for name in options.cases or source.cases if name not in done]
        for name, outcome in _run_all(source, options.folder, names, options.limit, options.jobs):
            failed += outcome.status != RIGHT
            print(f"{name}: {outcome}", flush=True)
            if options.record:
                keep(source, options.record, {name: outcome})
    elif not options.page:
        parser.error("needs a source and its folder, or --page")
    if options.page:
        PAGE.write_text(page(recorded()))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
