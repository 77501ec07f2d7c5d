"""Kernels of a piece of work on a GPU: their calls, and how long they take together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN_KERNELS, NAME_LENGTH = 40, 100


def kernel_times(
    work: Callable[[], object], trace: Path | None = None
) -> list[tuple[str, int, float]]:
    """Name, calls and microseconds of each kernel of one call of `work`, the slowest first.

    Launches overlap: a kernel that waits for the one before counts the wait.

    Args:
        trace: also write a timeline here, for Perfetto.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    if trace is not None:
        found.export_chrome_trace(str(trace))
    rows = [(e.key[:NAME_LENGTH], e.count, e.self_device_time_total) for e in found.key_averages()]
    rows = [row for row in rows if row[2] > 0]
    return sorted(rows, key=lambda row: -row[2])[:SHOWN_KERNELS]
