"""Kernels of a piece of work on a GPU: their calls, and how long they take together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SHOWN_KERNELS, NAME_LENGTH = 40, 100


class Span(NamedTuple):
    """A kernel's run, in microseconds."""

    kernel: str
    start: float
    end: float


def kernel_times(
    work: Callable[[], object], trace: Path | None = None
) -> list[tuple[str, int, float]]:
    """Name, calls and microseconds of each kernel of one call of `work`, as `own_times` gives them.

    Args:
        trace: also write a timeline here, for Perfetto.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    if trace is not None:
        found.export_chrome_trace(str(trace))
    spans = (
        Span(e.name, e.time_range.start, e.time_range.end)
        for e in found.events()
        if e.device_type != DeviceType.CPU
    )
    return own_times(spans)[:SHOWN_KERNELS]


def own_times(spans: Iterable[Span]) -> list[tuple[str, int, float]]:
    """Name, calls and microseconds of each kernel, the slowest first; together the time in which
    any of them ran.

    Under programmatic dependent launch a kernel starts while the one before it runs, and waits for
    its end. So a run counts from where all that started before it have ended.
    """
    calls: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    ended = float("-inf")
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        name = span.kernel[:NAME_LENGTH]
        calls[name] += 1
        times[name] += max(0.0, span.end - max(span.start, ended))
        ended = max(ended, span.end)
    return sorted(((n, calls[n], times[n]) for n in calls), key=lambda row: -row[2])
