"""`sparse_fmha_with_swa` on a GPU: time, rates, the machine's floor, and the peers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4 import ops
from dsv4.bench.machine import Machine
from dsv4.bench.peers import Peer, Run
from dsv4.bench.shapes import Arguments, rotating_arguments
from dsv4.bench.timing import graph_microseconds, host_microseconds
from dsv4.ops.runtime.runner import runner_config
from dsv4.reference.attention import sparse_fmha_with_swa as oracle
from dsv4.testing.accuracy import BFLOAT16, Accuracy
from dsv4.testing.attention import Case

SINK_MODE = "softmax"
MAX_ERROR = BFLOAT16.relative  # of our output against the oracle
CHECKED_TOKENS = 2  # so many of the first, and of the last


@dataclass(frozen=True)
class Result:
    """Times in microseconds.

    Attributes:
        num_splits: KV splits of our launch.
        error: of our output against the oracle, relative.
        peers: by name; a peer that does not serve the shape is absent.
        failures: by name, why a peer that should has no time.
    """

    case: Case
    num_splits: int
    microseconds: float
    floor: float
    error: float
    peers: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def teraflops(self) -> float:
        return self.case.flops / self.microseconds / 1e6

    @property
    def gigabytes(self) -> float:
        return self.case.bytes / self.microseconds / 1e3


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
    cases: list[Case], machine: Machine, *, num_splits: int | None, peers: list[Peer]
) -> Iterator[Result]:
    """Measure each case; peers run on the same inputs. Nothing is timed that is not right.

    Raises:
        RuntimeError: our own output differs from the oracle.
    """
    for case in cases:
        yield _measure(case, machine, num_splits, peers)
        # The next case needs the memory, in blocks of other sizes.
        torch.cuda.empty_cache()


@torch.inference_mode()
def _measure(case: Case, machine: Machine, num_splits: int | None, peers: list[Peer]) -> Result:
    inputs = rotating_arguments(case)
    runs = our_runs(case, inputs, num_splits)
    error = relative_error(runs[0], inputs[0])
    if not error <= MAX_ERROR:
        raise RuntimeError(
            f"{described(case)}: the output is off by {error:.2e}, allowed are {MAX_ERROR}"
        )
    time = graph_microseconds([run.call for run in runs])
    times, failures = {}, {}
    for peer in peers:
        if not peer.serves(case):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                times[peer.name] = _peer_microseconds(peer, case, inputs)
        except Exception as failure:
            # A peer's fault must not end the benchmark.
            failures[peer.name] = f"{type(failure).__name__}: {failure}"
    splits = chosen_splits(case, num_splits)
    floor = machine.floor(case.bytes, case.flops)
    return Result(case, splits, time, floor, error, times, failures)


def described(case: Case) -> str:
    """A case in a message."""
    return f"T={case.tokens}, {case.heads} heads, {case.top_k} + {case.window_rows} keys"


def _peer_microseconds(peer: Peer, case: Case, inputs: list[Arguments]) -> float:
    torch.cuda.empty_cache()
    needed = peer.copies * case.bytes * len(inputs)
    available = torch.cuda.mem_get_info()[0]
    if needed > available:
        raise MemoryError(f"needs {needed / 1e9:.0f} GB, {available / 1e9:.0f} are free")
    runs = peer.prepare(case, inputs)
    error = relative_error(runs[0], inputs[0], peer)
    if not error <= peer.error:
        raise ValueError(f"its output is off by {error:.2e}, allowed are {peer.error}")
    return graph_microseconds([run.call for run in runs])


def relative_error(run: Run, inputs: Arguments, peer: Peer | None = None) -> float:
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
    return Accuracy.of(run.output()[some], expected).relative


def our_runs(case: Case, inputs: list[Arguments], num_splits: int | None) -> list[Run]:
    """The operator, warmed up."""
    runner = runner_id(case, num_splits)
    ops.warmup(runner, case.tokens)
    op = torch.ops.dsv4.sparse_fmha_with_swa.default

    def run(each: Arguments) -> Run:
        def call() -> None:
            op(*each, runner)

        def output() -> Tensor:
            call()
            return each.o

        return Run(call, output)

    return [run(each) for each in inputs]


def runner_id(case: Case, num_splits: int | None) -> int:
    return ops.fmha_runner_id(
        case.head_dim,
        case.heads,
        case.window_rows,
        case.top_k,
        sink_mode=SINK_MODE,
        num_splits=num_splits,
    )


def chosen_splits(case: Case, num_splits: int | None) -> int:
    """KV splits of our launch."""
    from dsv4.ops.attention import launch as fmha_cuda

    config = runner_config(runner_id(case, num_splits))
    return fmha_cuda.num_splits(config, case.tokens, case.top_k, case.window_rows)


@torch.inference_mode()
def host_cost() -> HostCost:
    """Host time of the operator and of its launch alone, as a model calls it: in inference mode,
    the number of splits left to the launcher. A shape that it does not split, or a second kernel
    would be in both times."""
    from dsv4.ops.attention import launch as fmha_cuda

    case = Case.decode(128, 128, 1024)
    inputs = rotating_arguments(case)[:1]
    (run,) = our_runs(case, inputs, None)
    launch = fmha_cuda.bare_launch(runner_config(runner_id(case, None)), *inputs[0])
    return HostCost(*host_microseconds(run.call, launch))
