"""Rates that the GPU of this machine reaches, and its identity, to repeat a benchmark."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dsv4.bench.timing import copy_bandwidth, fp8_rate, matmul_rate, read_bandwidth

# Column of `nvidia-smi --query-gpu` -> key of the record.
GPU_QUERIES = {
    "driver_version": "driver",
    "clocks.max.sm": "max_sm_clock",
    "clocks.max.mem": "max_memory_clock",
    "power.limit": "power_limit",
}


@dataclass(frozen=True)
class Machine:
    """Rates of this GPU: bytes per second of a large copy and of a large reduction, FLOP per
    second of a large matrix product in bf16, and of one in FP8 where it has these."""

    name: str
    copy: float
    read: float
    rate: float
    fp8_rate: float | None = None

    @classmethod
    def measure(cls) -> Machine:
        return cls(
            torch.cuda.get_device_name(), copy_bandwidth(), read_bandwidth(), matmul_rate(),
            fp8_rate(),
        )  # fmt: skip

    @property
    def bandwidth(self) -> float:
        """Bytes per second that no kernel exceeds."""
        return max(self.copy, self.read)

    def floor(self, moved: float, flops: float = 0.0) -> float:
        """Microseconds that no kernel of so many bytes and FLOPs beats: the larger of two times."""
        return max(moved / self.bandwidth, flops / self.rate) * 1e6

    def __str__(self) -> str:
        return (
            f"{self.name}: copy {self.copy / 1e12:.2f} TB/s, read {self.read / 1e12:.2f} TB/s, "
            f"matmul {self.rate / 1e12:.0f} TFLOP/s"
            + ("" if self.fp8_rate is None else f", in FP8 {self.fp8_rate / 1e12:.0f}")
        )


def circumstances() -> dict[str, Any]:
    """Date, command, commit, driver, clocks and software of this run, for its record.

    What cannot be found out is None.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["dsv4", *sys.argv[1:]]),
        "commit": _commit(),
        "gpu": _gpu(),
        "software": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvidia-cutlass-dsl": _version("nvidia-cutlass-dsl"),
        },
    }


def _gpu() -> dict[str, str | None]:
    said = _output("nvidia-smi", f"--query-gpu={','.join(GPU_QUERIES)}", "--format=csv,noheader")
    values = said.splitlines()[0].split(", ") if said else [None] * len(GPU_QUERIES)
    return dict(zip(GPU_QUERIES.values(), values))


def _commit() -> str | None:
    """Of the repository that this file is in; "-dirty" where files differ from it."""
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _output(program: str, *arguments: str) -> str | None:
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
