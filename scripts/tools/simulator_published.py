#!/usr/bin/env python3
"""Holds the B200 time model against published times: NVIDIA's CuTeDSL examples at their sizes.

    scripts/tools/simulator_published.py CUTLASS           # all of them, a few minutes, no GPU
    scripts/tools/simulator_published.py CUTLASS fmha      # some

CUTLASS is a clone of github.com/NVIDIA/cutlass. The examples run unmodified, as
scripts/tools/simulator_examples.py runs them, but their launches are modelled instead of simulated.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dsv4.simulator.frontend.script import Launcher, run_script  # noqa: E402
from scripts.tools.simulator_examples import sources  # noqa: E402

ARCH = "sm_100a"
HEADER = (
    "kernel",
    "work",
    "model us",
    "model TFLOP/s",
    "published TFLOP/s",
    "model",
    "busiest unit",
)


@dataclass(frozen=True)
class Published:
    """An example at a size, and what is published for that kernel or for one that does the same."""

    path: str
    work: str
    arguments: str
    flops: float
    teraflops: float
    source: str


def _gemm(size: int, persistent: bool, teraflops: float, source: str) -> Published:
    file = "dense_gemm_persistent" if persistent else "dense_gemm"
    return Published(
        f"cute/blackwell/kernel/dense_gemm/{file}.py",
        f"{size}^3",
        f"--mnkl {size},{size},{size},1 --ab_dtype Float16 --c_dtype Float16 --acc_dtype Float32 "
        "--mma_tiler_mn 256,256 --cluster_shape_mn 2,1 --use_2cta_instrs --use_tma_store "
        "--skip_ref_check",
        2.0 * size**3,
        teraflops,
        source,
    )


_B300 = "the same example on a B300, gb300-microbench"
PUBLISHED = {
    "gemm": _gemm(4096, False, 1507, "cuBLAS on a B200, gau-nernst"),
    "persistent-gemm": _gemm(4096, True, 1665, _B300),
    "large-gemm": _gemm(8192, True, 1444, f"{_B300}, at its power limit"),
    "fmha": Published(
        "cute/blackwell/kernel/attention/fmha/fmha.py",
        "16 heads, 8192 x 8192, d 128",
        "--q_shape 1,8192,16,128 --k_shape 1,8192,16,128 --in_dtype Float16 --out_dtype Float16 "
        "--is_persistent --skip_ref_check",
        4.0 * 16 * 8192**2 * 128,
        1605,
        "FlashAttention-4 on a B200, best of its shapes",
    ),
}


class Modeller(Launcher):
    """Models what compiled functions launch."""

    def __init__(self):
        super().__init__(races=False)
        self.longest = None

    def install(self, multiprocessors: int) -> None:
        """Also let the examples' benchmarks, which are what launches here, call once."""
        import cutlass.testing

        super().install(multiprocessors)

        def benchmark(function, *, workspace_generator=None, kernel_arguments=None, **_) -> float:
            given = kernel_arguments or workspace_generator()
            function(*given.args, **given.kwargs)
            return 1.0

        for module in (cutlass.testing, cutlass.cute.testing):
            module.benchmark = benchmark

    def run(self, compiled, *arguments) -> int:
        """Model one call and keep the longest launch; returns the success code."""
        import torch

        from dsv4.simulator.timing import predict

        live = [
            t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.is_cpu
            and t.layout == torch.strided
        ]  # fmt: skip
        launch = predict(compiled, *arguments, buffers=live).longest
        if self.longest is None or launch.microseconds > self.longest.microseconds:
            self.longest = launch
        return 0


def model(cutlass: Path, case: Published) -> None:
    """Run one example in this process and print its row."""
    modeller = Modeller()
    examples = cutlass / sources()["nvidia"].root
    arguments = case.arguments.split()
    run_script(examples / case.path, arguments, ARCH, modeller, [examples.resolve()])
    launch = modeller.longest
    rate = case.flops / launch.microseconds / 1e6
    error = f"{rate / case.teraflops - 1:+.0%}"
    known = f"{case.teraflops:.0f} ({case.source})"
    cells = (Path(case.path).name, case.work, f"{launch.microseconds:.1f}", f"{rate:.0f}", known)
    print(_line((*cells, error, launch.bound)))


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cutlass", type=Path, help="a clone of github.com/NVIDIA/cutlass")
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(PUBLISHED))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.cases or list(PUBLISHED)
    if unknown := set(names) - set(PUBLISHED):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(PUBLISHED)}")
    if arguments.here:
        model(arguments.cutlass, PUBLISHED[names[0]])
        return 0
    print("B200 model: predictions, not measurements")
    print(_line(HEADER))
    print(_line(["---"] * len(HEADER)))
    status = 0
    for name in names:
        # Each in a process of its own: running an example changes torch and the compiler for good.
        command = [sys.executable, __file__, str(arguments.cutlass), name, "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            status = 1
            print(f"{name}: failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        else:
            print(done.stdout.strip().splitlines()[-1], flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
