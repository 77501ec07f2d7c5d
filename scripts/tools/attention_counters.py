#!/usr/bin/env python3
"""Prints hardware counters of the attention kernel, read by Nsight Compute, as a Markdown table.

    scripts/tools/attention_counters.py  # the shapes below; needs a GPU and ncu
    scripts/tools/attention_counters.py --shape T,HEADS,TOP_K,WINDOW ...

Each shape is launched once to warm up and once more, which is counted. ncu repeats that launch for
every group of counters and leaves the clocks alone; a launch on its own starts cold, so that its
time is longer than what `dsv4 bench attention` prints.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4.bench.attention import our_runs  # noqa: E402
from dsv4.bench.shapes import rotating_arguments  # noqa: E402
from dsv4.cli.bench import SHAPE_FORMAT, parse_shape  # noqa: E402
from dsv4.testing.attention import Case  # noqa: E402

SHAPES = (
    *((1, 128, 1024, 128), (16, 128, 1024, 128), (64, 128, 1024, 128), (256, 128, 1024, 128)),
    *((16, 64, 512, 128), (128, 64, 512, 128), (1024, 64, 512, 128), (64, 8, 1024, 128)),
)
PERCENT = ".avg.pct_of_peak_sustained_elapsed"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Column title -> counter, and what its value is divided by.
COUNTERS: dict[str, tuple[str, float]] = {
    "us": ("gpu__time_duration.sum", 1e3),
    "cycles": ("sm__cycles_elapsed.avg", 1),
    "tensor pipe %": ("sm__pipe_tensor_cycles_active" + PERCENT, 1),
    "issue slots %": ("smsp__issue_active" + PERCENT, 1),
    "shared memory reads %": ("l1tex__data_bank_reads" + PERCENT, 1),
    "L2 %": ("lts__throughput" + PERCENT, 1),
    "L2 to SM MB": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1e6),
    "DRAM %": ("dram__throughput" + PERCENT, 1),
    "DRAM read MB": ("dram__bytes_read.sum", 1e6),
    "long scoreboard": (STALL.format("long_scoreboard"), 1),
    "barrier": (STALL.format("barrier"), 1),
    "wait": (STALL.format("wait"), 1),
}
TIMEOUT_SECONDS = 300


def launch(case: Case) -> None:
    """A warm-up and the launch that is counted, which a marker of the profiler surrounds."""
    (run, *_) = our_runs(case, rotating_arguments(case)[:2], None)
    run.call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run.call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profile(ncu: str, cases: list[Case]) -> list[dict[str, float]]:
    """One dict of counters per case."""
    metrics = ",".join(counter for counter, _ in COUNTERS.values())
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--page", "raw", "--print-units", "base", "--metrics", metrics]
    child = [sys.executable, str(Path(__file__).resolve()), "--launch", "--shape"]
    child += [f"{x.tokens},{x.heads},{x.top_k},{x.window_rows}" for x in cases]
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    try:
        done = subprocess.run(command + child, **options)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"ncu did not end within {TIMEOUT_SECONDS} seconds") from None
    start = done.stdout.find('"ID"')
    if done.returncode or start < 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise SystemExit(f"ncu failed with status {done.returncode} and said last: {said[-1]}")
    header, _units, *rows = csv.reader(io.StringIO(done.stdout[start:]))
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    if len(rows) != len(cases):
        raise SystemExit(f"ncu saw {len(rows)} launches, expected {len(cases)}: one per shape")
    names = [counter for counter, _ in COUNTERS.values()]
    return [{name: float(row[name].replace(",", "")) for name in names} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", nargs="+", action="extend", type=parse_shape, metavar=SHAPE_FORMAT
    )
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [Case.decode(*numbers) for numbers in args.shape or SHAPES]
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the counters are those of a GPU")
    if args.launch:
        with torch.inference_mode():
            for case in cases:
                launch(case)
        return 0
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(ncu).exists():
        raise SystemExit("ncu was not found: it comes with the CUDA toolkit (Nsight Compute)")
    print(f"{torch.cuda.get_device_name()}: stalls are warps waiting per instruction issued\n")
    titles = ["T", "heads", "keys", *COUNTERS]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for case, counters in zip(cases, profile(ncu, cases), strict=True):
        values = [counters[counter] / unit for counter, unit in COUNTERS.values()]
        cells = [case.tokens, case.heads, case.keys, *(f"{value:.4g}" for value in values)]
        print(f"| {' | '.join(str(cell) for cell in cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
