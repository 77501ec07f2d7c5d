"""`sparse_fmha_with_swa` on a GPU: time, rates, the machine's floor, and the peers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench.peers import Peer, Run
from dsv4.bench.shapes import Inputs, Shape, make_inputs
from dsv4.bench.timing import (
    copy_bandwidth,
    graph_microseconds,
    host_microseconds,
    matmul_rate,
    read_bandwidth,
)
from dsv4.ops.runtime.runner import runner_config
from dsv4.reference.attention import sparse_fmha_with_swa as oracle

SINK_MODE = "softmax"
MAX_ERROR = 4e-3  # of our output against the oracle: relative, Frobenius
CHECKED_TOKENS = 2  # so many of the first, and of the last


@dataclass(frozen=True)
class Machine:
    """What this GPU reaches: bytes per second of a large copy and of a large reduction, FLOP per
    second of a large matrix product."""

    name: str
    copy: float
    read: float
    rate: float

    @classmethod
    def measure(cls) -> Machine:
        return cls(torch.cuda.get_device_name(), copy_bandwidth(), read_bandwidth(), matmul_rate())

    @property
    def bandwidth(self) -> float:
        """Bytes per second that no kernel exceeds."""
        return max(self.copy, self.read)

    def floor(self, shape: Shape) -> float:
        """Microseconds that no kernel for `shape` beats: the larger of its two times."""
        return max(shape.bytes / self.bandwidth, shape.flops / self.rate) * 1e6


@dataclass(frozen=True)
class Result:
    """Times in microseconds.

    Attributes:
        num_splits: KV splits of our launch.
        error: of our output against the oracle, relative.
        peers: by name; a peer that does not serve the shape is absent.
        failures: by name, why a peer that should has no time.
    """

    shape: Shape
    num_splits: int
    microseconds: float
    floor: float
    error: float
    peers: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def teraflops(self) -> float:
        return self.shape.flops / self.microseconds / 1e6

    @property
    def gigabytes(self) -> float:
        return self.shape.bytes / self.microseconds / 1e3


@dataclass(frozen=True)
class HostCost:
    """Microseconds that one call keeps the host.

    The launch is what the compiled function takes with its arguments at hand: tensor maps,
    argument checks, and the driver. The operator adds PyTorch's dispatch and ours.
    """

    operator: float
    launch: float

    @property
    def beyond(self) -> float:
        return self.operator - self.launch


def measure(
    shapes: list[Shape], machine: Machine, *, num_splits: int | None, peers: list[Peer]
) -> Iterator[Result]:
    """Measure each shape; peers run on the same inputs. Nothing is timed that is not right.

    Raises:
        RuntimeError: our own output differs from the oracle.
    """
    for shape in shapes:
        yield _measure(shape, machine, num_splits, peers)
        # The next shape needs the memory, in blocks of other sizes.
        torch.cuda.empty_cache()


@torch.inference_mode()
def _measure(shape: Shape, machine: Machine, num_splits: int | None, peers: list[Peer]) -> Result:
    inputs = make_inputs(shape)
    runs = our_runs(shape, inputs, num_splits)
    error = relative_error(runs[0], inputs[0])
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{shape}: the output is off by {error:.2e}, allowed are {MAX_ERROR}")
    time = graph_microseconds([run.call for run in runs])
    times, failures = {}, {}
    for peer in peers:
        if not peer.serves(shape):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                times[peer.name] = _peer_microseconds(peer, shape, inputs)
        except Exception as failure:
            # A peer's fault must not end the benchmark.
            failures[peer.name] = f"{type(failure).__name__}: {failure}"
    splits = chosen_splits(shape, num_splits)
    return Result(shape, splits, time, machine.floor(shape), error, times, failures)


def _peer_microseconds(peer: Peer, shape: Shape, inputs: list[Inputs]) -> float:
    torch.cuda.empty_cache()
    needed = peer.copies * shape.bytes * len(inputs)
    available = torch.cuda.mem_get_info()[0]
    if needed > available:
        raise MemoryError(f"needs {needed / 1e9:.0f} GB, {available / 1e9:.0f} are free")
    runs = peer.prepare(shape, inputs)
    error = relative_error(runs[0], inputs[0], peer)
    if not error <= peer.error:
        raise ValueError(f"its output is off by {error:.2e}, allowed are {peer.error}")
    return graph_microseconds([run.call for run in runs])


def relative_error(run: Run, inputs: Inputs, peer: Peer | None = None) -> float:
    """Frobenius error of a run against the oracle, on the first and last tokens; NaN if any is."""
    every = torch.arange(len(inputs.q), device=inputs.q.device)
    some = torch.cat((every[:CHECKED_TOKENS], every[-CHECKED_TOKENS:])).unique()
    keys = (inputs.compressed_kv[some], inputs.swa_kv[some])
    if peer is not None:
        keys = tuple(peer.keys(each) for each in keys)
    expected, _ = oracle(
        inputs.q[some],
        *keys,
        inputs.swa_lens[some],
        inputs.sink_logits,
        torch.arange(len(some), dtype=torch.int32, device=some.device),
        sink_mode=SINK_MODE,
    )
    got: Tensor = run.output()[some].float()
    return ((got - expected).norm() / expected.norm()).item()


def our_runs(shape: Shape, inputs: list[Inputs], num_splits: int | None) -> list[Run]:
    """The operator, warmed up."""
    runner = runner_id(shape, num_splits)
    ops.warmup(runner, shape.tokens)
    op = torch.ops.dsv4.sparse_fmha_with_swa.default

    def run(each: Inputs) -> Run:
        def call() -> None:
            op(*each, runner)

        def output() -> Tensor:
            call()
            return each.o

        return Run(call, output)

    return [run(each) for each in inputs]


def runner_id(shape: Shape, num_splits: int | None) -> int:
    return ops.fmha_runner_id(
        shape.head_dim,
        shape.heads,
        shape.window,
        shape.top_k,
        sink_mode=SINK_MODE,
        num_splits=num_splits,
    )


def chosen_splits(shape: Shape, num_splits: int | None) -> int:
    """KV splits of our launch."""
    from dsv4.ops.attention import launch as fmha_cuda

    config = runner_config(runner_id(shape, num_splits))
    return fmha_cuda.num_splits(config, shape.tokens, shape.top_k, shape.window)


@torch.inference_mode()
def host_cost() -> HostCost:
    """Host time of the operator and of its launch alone, as a model calls it: in inference mode,
    the number of splits left to the launcher. A shape that it does not split, or a second kernel
    would be in both times."""
    from dsv4.ops.attention import launch as fmha_cuda

    shape = Shape("Pro", 128, 128, 1024)
    inputs = make_inputs(shape)[:1]
    (run,) = our_runs(shape, inputs, None)
    launch = fmha_cuda.bare_launch(runner_config(runner_id(shape, None)), *inputs[0])
    return HostCost(*host_microseconds(run.call, launch))
