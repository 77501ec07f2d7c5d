#!/usr/bin/env python3
"""Prints the time model's GEMM times beside those of an H200, or measures the latter.

    scripts/tools/simulator_gemm_times.py  # the table; needs no GPU
    scripts/tools/simulator_gemm_times.py --held-out  # of sizes that no figure was set by
    scripts/tools/simulator_gemm_times.py --measure FILE  # times the same kernels on a GPU (sm_90a)
    scripts/tools/simulator_gemm_times.py --held-out --measure FILE  # sizes kept for a check

Measured is as in `dsv4 bench`: replays of a CUDA graph over operands that do not fit L2 together.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4.bench.timing import graph_microseconds  # noqa: E402
from dsv4.simulator.timing import H200  # noqa: E402
from tests.simulator.timing.gemm_cases import (  # noqa: E402
    HELD_OUT_SIZES,
    MEASURED,
    MEASURED_HELD_OUT,
    SIZES,
    Gemm,
    gemms,
    load,
)

DISTINCT_BYTES = 200 << 20  # operands of a replay together: several times L2
BOUND = 0.25
CLOCK_SECONDS = 0.05  # that a kernel runs before the clock is read
MAX_ERROR = 1e-4  # relative, against float32 products of the same operands
HEADER = (
    "kernel", "M", "N", "K", "measured us", "TFLOP/s", "MHz", "model us", "error", "busiest unit",
)  # fmt: skip


def measure(gemm: Gemm) -> dict:
    """Times of one GEMM and of cuBLAS on random operands, and the clock that the SMs held."""
    size = sum(x.numel() * x.element_size() for x in gemm.operands())
    compiled = gemm.compile()
    operands = [gemm.operands("cuda") for _ in range(max(2, math.ceil(DISTINCT_BYTES / size)))]
    for a, b, c in operands:
        a.normal_()
        b.normal_()
        c.fill_(float("nan"))
    a, b, c = operands[0]
    compiled(a, b, c)
    expected = a.float() @ b.float().T
    error = ((c - expected).norm() / expected.norm()).item()
    if not error <= MAX_ERROR:
        raise ArithmeticError(f"{gemm}: wrong by {error}")
    calls = [lambda abc=abc: compiled(*abc) for abc in operands]
    microseconds = graph_microseconds(calls)
    for _ in range(math.ceil(CLOCK_SECONDS * 1e6 / microseconds)):
        calls[0]()
    clock = torch.cuda.clock_rate()
    torch.cuda.synchronize()
    out = torch.empty_like(c, dtype=a.dtype)
    peer = graph_microseconds([lambda a=a, b=b: torch.mm(a, b.T, out=out) for a, b, _ in operands])
    return {
        "kernel": gemm.kernel, "m": gemm.m, "n": gemm.n, "k": gemm.k,
        "microseconds": round(microseconds, 2), "clock_mhz": clock,
        "cublas_microseconds": round(peer, 2),
    }  # fmt: skip


def write_measurements(path: Path, listed_gemms: Iterable[Gemm]) -> None:
    """Measure GEMMs on this GPU and write the results as JSON, one a line."""
    machine = {
        "name": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
    }
    results = []
    for gemm in listed_gemms:
        results.append(json.dumps(measure(gemm)))
        print(results[-1], flush=True)
    listed = ",\n  ".join(results)
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n "results": [\n  {listed}\n ]\n}}\n')


def print_table(path: Path) -> None:
    """Print measured and modelled times as Markdown."""
    print(f"{H200.name} model, sm_90a: predictions beside measurements")
    print(_line(HEADER))
    print(_line(["---"] * len(HEADER)))
    errors = []
    for row in load(path):
        gemm, prediction = row.gemm, row.gemm.predict()
        errors.append(prediction.microseconds / row.microseconds - 1)
        rate = gemm.flops / row.microseconds / 1e6
        numbers = (gemm.m, gemm.n, gemm.k, f"{row.microseconds:.1f}", f"{rate:.0f}", row.clock_mhz)
        modelled = (f"{prediction.microseconds:.1f}", f"{errors[-1]:+.0%}")
        cells = (gemm.kernel, *map(str, numbers), *modelled, prediction.longest.bound)
        print(_line(cells), flush=True)
    sizes = [abs(error) for error in errors]
    within = sum(size <= BOUND for size in sizes)
    print(
        f"model against measurement: mean error {sum(sizes) / len(sizes):.1%}, signed "
        f"{sum(errors) / len(errors):+.1%}, worst "
        f"{max(sizes):.0%}, within {BOUND:.0%} for {within} of {len(sizes)} GEMMs"
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure on this GPU instead")
    parser.add_argument(
        "--held-out", action="store_true", help="the sizes that the model was not calibrated with"
    )
    parser.add_argument("--measured", type=Path, help="measurements to print (default: recorded)")
    arguments = parser.parse_args()
    if arguments.measure:
        write_measurements(
            arguments.measure, gemms(HELD_OUT_SIZES if arguments.held_out else SIZES)
        )
    else:
        recorded = MEASURED_HELD_OUT if arguments.held_out else MEASURED
        print_table(arguments.measured or recorded)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
