"""Time of device work, free of launch gaps, of what the caches remember, and of heat."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

# A replay goes through all inputs, and lasts long enough that its own start does not count.
MIN_REPLAY_CALLS = 20
MIN_REPLAY_MICROSECONDS = 4000.0
REPLAYS = 15
# Before each measurement the GPU rests: work that hit the power cap would slow what comes next.
REST_SECONDS = 0.1
HOST_CALLS = 50  # fewer than a stream's queue holds, so that no call waits for the device
HOST_ROUNDS = 20


def graph_microseconds(calls: Sequence[Callable[[], object]], *, best: bool = False) -> float:
    """Median time of one call, in microseconds, over replays of a CUDA graph.

    Args:
        calls: the same work on different buffers. Together they should be larger than the L2
            cache; the graph goes through all of them in turn.
        best: the shortest replay instead of the median one, for what a machine can do at most.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        once = elapsed_microseconds(calls[0])
    torch.cuda.current_stream().wait_stream(stream)
    enough = min(MIN_REPLAY_CALLS, math.ceil(MIN_REPLAY_MICROSECONDS / once))
    graph, count = capture(calls, enough)
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    graph.replay()
    times = [elapsed_microseconds(graph.replay) / count for _ in range(REPLAYS)]
    return min(times) if best else statistics.median(times)


def capture(calls: Sequence[Callable[[], object]], enough: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph that goes through all calls in turn, `enough` times at least, and how many it
    has."""
    count = len(calls) * math.ceil(enough / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph, count


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which ran once before it; its nodes can be counted."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    graph.instantiate()
    return graph


def elapsed_microseconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def host_microseconds(*calls: Callable[[], object]) -> list[float]:
    """Median time that a call of each kind keeps the host, in microseconds.

    Calls follow each other as those of a model do, without waiting for the device. The kinds take
    turns, so that what disturbs the host disturbs all of them.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(HOST_ROUNDS):
        for call, found in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            found.append((time.perf_counter() - begin) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize()
    return [statistics.median(found) for found in times]


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted.

    By a kernel: the copy engines that serve a plain copy inside a graph reach two thirds of it.
    """
    source = torch.empty(1 << 28, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    size = 2 * source.numel() * source.element_size()
    return size / graph_microseconds([lambda: torch.neg(source, out=target)], best=True) * 1e6


def read_bandwidth() -> float:
    """Bytes per second of a large reduction, which only reads, as attention mostly does."""
    source = torch.randn(1 << 29, device="cuda")
    return (
        source.numel() * source.element_size() / graph_microseconds([source.amax], best=True) * 1e6
    )


def matmul_rate() -> float:
    """FLOP per second of a large bf16 matrix product, before the power cap slows it."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_microseconds([lambda: torch.mm(a, b, out=out)], best=True) * 1e6


def fp8_rate() -> float | None:
    """The same of e4m3, a scale for each tensor, with bf16 results; None where there is none."""
    size, one = 8192, torch.ones((), device="cuda")
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))

    def product() -> None:
        torch._scaled_mm(a, b.mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        return 2 * size**3 / graph_microseconds([product], best=True) * 1e6
    except RuntimeError:
        return None
