#!/usr/bin/env python
"""Run NVIDIA's CuTeDSL examples, unmodified, in the simulator.

    scripts/tools/simulator_examples.py CUTLASS                 # every case, one process each
    scripts/tools/simulator_examples.py CUTLASS mla-fp8 fmha    # some of them
    scripts/tools/simulator_examples.py CUTLASS --run sm_100a FILE [argument ...]   # any example

CUTLASS is a clone of github.com/NVIDIA/cutlass. An example makes its inputs, compiles, launches and
checks its own outputs against PyTorch; here "cuda" tensors stay on the CPU and a launch is a
simulation. A case passes if the example ends without an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dsv4.simulator.frontend.script import Launcher, run_script

EXAMPLES = Path("examples/python/CuTeDSL")


@dataclass(frozen=True)
class Case:
    """One example with the arguments of a size that simulates within minutes."""

    path: str
    arguments: str = ""
    arch: str = "sm_100a"


def _cases() -> dict[str, Case]:
    """Every case of the table, by name."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Case(**fields) for name, fields in table.items()}


CASES = _cases()


def run_example(cutlass: Path, arch: str, path: str, arguments: list[str], options) -> None:
    """Simulate one example in this process and report what it did."""
    launcher = Launcher([options.schedule], options.races)
    start = time.perf_counter()
    examples = cutlass / EXAMPLES
    run_script(examples / path, arguments, arch, launcher, [examples.resolve()])
    seconds = time.perf_counter() - start
    report = launcher.report
    if not report.launches:
        sys.exit(f"{path} launched no kernel")
    for finding in report.findings:
        print(finding)
    instructions = sum(launch.instructions for launch in report.launches)
    print(f"{path}: {instructions} warp instructions, {seconds:.1f} s")


def run_case(cutlass: Path, case: Case, flags: list[str], limit: float) -> tuple[bool, str]:
    """Run a case in a process of its own: (passed, last lines of its output)."""
    command = [sys.executable, __file__, str(cutlass), *flags, "--run", case.arch, case.path]
    try:
        done = subprocess.run(
            [*command, *case.arguments.split()],
            capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"not done after {limit:.0f} s"
    if done.returncode == 0:
        return True, done.stdout.strip().splitlines()[-1]
    return False, "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cutlass", type=Path, help="a clone of github.com/NVIDIA/cutlass")
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--schedule", default="eager", choices=("eager", "lazy", "random"))
    parser.add_argument("--races", action="store_true", help="check happens-before too")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one case")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar=("ARCH", "FILE"))
    options = parser.parse_args()
    if not (options.cutlass / EXAMPLES).is_dir():
        parser.error(f"{options.cutlass} has no folder {EXAMPLES}")
    if options.run:
        arch, path, *arguments = options.run
        run_example(options.cutlass, arch, path, arguments, options)
        return 0
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    flags = ["--schedule", options.schedule] + ["--races"] * options.races
    failed = 0
    for name in options.cases or CASES:
        passed, text = run_case(options.cutlass, CASES[name], flags, options.limit)
        failed += not passed
        print(f"{'pass' if passed else 'FAIL'}  {name}: {text}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
