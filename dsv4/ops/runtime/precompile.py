"""Fill the compiled-runner cache ahead of time, for any architecture, with or without a GPU.

Each runner is compiled by a process of its own: the compiler reads its target architecture once,
when it is imported, and is not thread-safe. That process is
`python -m dsv4.ops.runtime.precompile`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from dsv4.ops.runtime.registry import CompileKey
from dsv4.ops.runtime.report import KEEP_IR, REMARKS, KernelReport, kernel_reports

ERROR_LENGTH = 500  # compiler errors go on for pages


@dataclass(frozen=True)
class Outcome:
    """Outcome of one runner's compilation.

    Attributes:
        label: as given.
        seconds: wall time of its process.
        error: what went wrong in one line; empty when it is in the cache now.
        kernels: reports, when they were asked for.
    """

    label: str
    seconds: float
    error: str = ""
    kernels: tuple[KernelReport, ...] = ()


def precompile(
    keys: Iterable[tuple[str, CompileKey]], *, jobs: int, report: bool
) -> Iterator[Outcome]:
    """Compile labelled keys into the cache, `jobs` at a time; yields outcomes as they come.

    With `report` every runner is compiled, also one that the cache has: only the compiler knows.
    """
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_in_child, label, key, report) for label, key in keys]
        for future in as_completed(running):
            yield future.result()


def _in_child(label: str, key: CompileKey, report: bool) -> Outcome:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as dump:
        settings = {"CUTE_DSL_ARCH": key.arch, "NO_COLOR": "1"}
        if report:
            settings |= {**KEEP_IR, "CUTE_DSL_DUMP_DIR": dump}
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((key, report)),
            env={**os.environ, **settings},
            capture_output=True,
        )
        seconds = time.perf_counter() - begin
        if child.returncode:
            return Outcome(label, seconds, _reason(child))
        if not report:
            return Outcome(label, seconds)
        ir = "".join(path.read_text() for path in Path(dump).rglob("*.mlir"))
        kernels = tuple(kernel_reports(child.stderr.decode(errors="replace"), ir))
        return Outcome(label, seconds, "" if kernels else "the compiler reported nothing", kernels)


def _reason(child: subprocess.CompletedProcess) -> str:
    """What a failed process printed as its error, else its last words (a crash)."""
    said = child.stdout.strip() or child.stderr.strip()
    lines = said.decode(errors="replace").splitlines()
    return lines[-1] if lines else f"the compiler ended with status {child.returncode}"


def main() -> int:
    """Compile the key that stdin holds; CUTE_DSL_ARCH must already be its architecture.

    An error is one line on stdout, apart from what the compiler prints on stderr.
    """
    from dsv4.ops.runtime.cache import RUNNERS, NotKept
    from dsv4.ops.runtime.registry import build

    # A kernel that is in no folder afterwards was not compiled ahead of time.
    warnings.simplefilter("error", NotKept)
    key, report = pickle.load(sys.stdin.buffer)
    try:
        if report:
            compiled = build(key, REMARKS)
            RUNNERS.get(key, lambda _: compiled)
        else:
            RUNNERS.get(key)
    except Exception as error:
        message = " ".join(str(error).split())
        print(f"{type(error).__name__}: {message[:ERROR_LENGTH]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
