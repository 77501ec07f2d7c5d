#!/usr/bin/env python3
"""Measures how fast the simulator runs: warp instructions per CPU second, checker off and on.

    scripts/tools/simulator_speed.py [--rounds 3] [--rates]

Each kernel runs once to compile its blocks, then `--rounds` times; the fastest counts. CPU seconds
of one process, so that other work on the machine matters little. Then, unless `--rates` asks for
this table alone, a decode step of 4 tokens, 128 heads and 1024 + 128 keys of 512 with two worker
processes, on each architecture: wall time, and the CPU time of all processes together.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4.cli.sim_attention import Workload, compile_attention  # noqa: E402
from dsv4.simulator import Report, simulate  # noqa: E402
from dsv4.testing.attention import Case  # noqa: E402
from tests.simulator.helpers.support import compile_kernel  # noqa: E402
from tests.simulator.kernels.gemm_sm90 import GemmSm90  # noqa: E402
from tests.simulator.kernels.gemm_sm100 import GemmSm100  # noqa: E402

Run = Callable[..., Report]


class Subject(NamedTuple):
    """A kernel with its arguments; `run` takes the options of `simulate`."""

    name: str
    run: Run


def attention(arch: str, tokens: int = 2, splits: int | None = 1) -> Subject:
    """A decode step of the attention kernel."""
    work = Workload(arch, Case.decode(tokens, heads=128, top_k=512), splits)
    compiled, call = compile_attention(work), work.call(work.inputs(seed=0)).poisoned()

    def run(**options) -> Report:
        return simulate(compiled.function, *call.args, **call.options, **options)

    name = {"sm_100a": "Blackwell", "sm_90a": "Hopper"}[arch]
    return Subject(f"{name} attention, {work}", run)


def gemm(arch: str) -> Subject:
    """A bf16 GEMM of the tests, with pairs of CTAs on Blackwell."""
    m, n, k = 512, 512, 1024
    operands = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.zeros(m, n)
    kernel = GemmSm100(True, (2, 1)) if arch == "sm_100a" else GemmSm90()
    compiled = compile_kernel(kernel, arch, *operands)
    return Subject(f"GEMM {m} x {n} x {k}, {arch}", lambda **o: simulate(compiled, *operands, **o))


def instructions_per_second(subject: Subject, races: bool, rounds: int) -> tuple[int, float]:
    """Warp instructions of one run, and how many of them a CPU second runs."""
    count = sum(launch.instructions for launch in subject.run(races=races).launches)
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        subject.run(races=races)
        best = min(best, time.process_time() - start)
    return count, count / best


def cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + workers.ru_utime + workers.ru_stime


def time_step(arch: str) -> None:
    """One whole decode step with two workers, blocks compiled on the way."""
    work = Workload(arch, Case.decode(4, heads=128, top_k=1024))
    compiled, call = compile_attention(work), work.call(work.inputs(seed=0)).poisoned()
    for races in (False, True):
        wall, cpu = time.perf_counter(), cpu_seconds()
        report = simulate(compiled.function, *call.args, **call.options, races=races, workers=2)
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        count = sum(launch.instructions for launch in report.launches)
        checker = "on" if races else "off"
        print(f"| {work} | {count:,} | {checker} | {wall:.1f} | {cpu:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each (default: 3)")
    parser.add_argument("--rates", action="store_true", help="the first table alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print("| kernel | warp instructions | thousand a CPU second | with the checker |")
    print("|---|---|---|---|")
    for subject in (attention("sm_100a"), attention("sm_90a"), gemm("sm_100a"), gemm("sm_90a")):
        count, plain = instructions_per_second(subject, False, args.rounds)
        _, checked = instructions_per_second(subject, True, args.rounds)
        print(
            f"| {subject.name} | {count:,} | {plain / 1e3:.0f} | {checked / 1e3:.0f} |", flush=True
        )
    if args.rates:
        return
    print("\n| decode step, 2 workers | warp instructions | checker | wall s | CPU s |")
    print("|---|---|---|---|---|")
    for arch in ("sm_100a", "sm_90a"):
        time_step(arch)


if __name__ == "__main__":
    main()
