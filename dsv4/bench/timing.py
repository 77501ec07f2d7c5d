"""Time of device work, free of launch gaps and of what the caches remember."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

MIN_CALLS = 20  # calls of a captured graph, so that its own start does not count
REPLAYS = 15


def graph_microseconds(calls: Sequence[Callable[[], None]]) -> float:
    """Median time of one call, in microseconds, over replays of a CUDA graph.

    Args:
        calls: the same work on different buffers. Together they should be larger than the L2
            cache; the graph goes through all of them in turn.
    """
    count = max(MIN_CALLS, len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def host_microseconds(call: Callable[[], None], count: int = 200) -> float:
    """Median time that `call` keeps the host, in microseconds; the device is idle at each start."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_microseconds([lambda: target.copy_(source)]) * 1e6


def matmul_rate() -> float:
    """FLOP per second of a large bf16 matrix product."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_microseconds([lambda: torch.mm(a, b, out=out)]) * 1e6
