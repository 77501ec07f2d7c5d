"""Targets that run a kernel under test: torch code in its place, the simulator, and a GPU.

A family describes one call (`Call`: arguments, and which of them the kernel writes); a target runs
it into poisoned outputs. Simulated calls are checked for races and missing fences in every
schedule, those on a GPU for equal bits from run to run, in graphs and on streams of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dsv4.arch import of_capability
from dsv4.testing.accuracy import assert_same_bits

if TYPE_CHECKING:
    from dsv4.simulator import Report

# When asynchronous work completes: at once, as late as possible, at random.
SCHEDULES = ("eager", "lazy", "random")
SOURCE_LINES = "DSV4_SOURCE_LINES"
Build = Callable[[Any, str], Any]  # (configuration, compiler options) -> compiled function


def poison(tensor: Tensor) -> Tensor:
    """Fill with NaN, or integers with bytes of ones; the tensor itself."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.fill_(torch.nan)
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


@dataclass(frozen=True)
class Call:
    """Arguments of a compiled function.

    Attributes:
        args, options: positional and by name; the stream is left out.
        outputs: those of the tensors that the kernel writes, by name; poisoned before each run.
        scratch: those that it writes for itself; a run leaves what they hold at first alone.
    """

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Call:
        """The same call on copies of its tensors, as strided as they are: an operand's major is in
        its strides."""
        copies: dict[int, Tensor] = {}

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                copy = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
                # Of what is repeated, one place is written.
                once = tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())
                copy[once].copy_(value[once])
                copies[id(value)] = copy
            return copies[id(value)]

        return Call(
            tuple(moved(x) for x in self.args),
            {name: moved(x) for name, x in self.options.items()},
            {name: moved(x) for name, x in self.outputs.items()},
            {name: moved(x) for name, x in self.scratch.items()},
        )

    def poisoned(self) -> Call:
        """The same call with its outputs filled anew."""
        for tensor in self.outputs.values():
            poison(tensor)
        return self


@dataclass(frozen=True)
class Outcome:
    """Result of one launch: copies of its outputs and scratch on the CPU, and the simulator's
    report."""

    outputs: dict[str, Tensor]
    scratch: dict[str, Tensor]
    report: Report | None = None

    @classmethod
    def of(cls, call: Call, report: Report | None = None) -> Outcome:
        """What a call's tensors hold now."""
        outputs, scratch = (
            {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
            for tensors in (call.outputs, call.scratch)
        )
        return cls(outputs, scratch, report)

    def __getitem__(self, name: str) -> Tensor:
        return self.outputs[name]

    def assert_same_bits(self, other: Outcome, what: str) -> None:
        """Fail with the output that differs."""
        for name, tensor in self.outputs.items():
            assert_same_bits(f"{name} ({what})", other.outputs[name], tensor)


class Target(Protocol):
    """Place where compiled functions run."""

    arch: str
    device: str
    schedules: tuple[str, ...]
    multiprocessors: int

    def compile(self, build: Build, config: Any) -> Any: ...
    def run(
        self, compiled: Any, call: Call, schedule: str = ..., seed: int = 0, races: bool = True
    ) -> Outcome: ...


class _Caller:
    """Calls of a target that runs what was compiled as it is, without schedules or races."""

    def run(
        self, compiled: Any, call: Call, schedule: str = "", seed: int = 0, races: bool = True
    ) -> Outcome:
        """Call it with tensors of the target's device."""
        call.poisoned()
        compiled(*call.args, **call.options)
        return Outcome.of(call)


class TorchCode(_Caller):
    """Target `cpu`: torch implementations, called as the kernels are."""

    arch = device = "cpu"
    schedules = ("as written",)
    multiprocessors = 1

    def compile(self, build: Build, config: Any) -> Any:
        """What `build` makes of a configuration."""
        return build(config, "")


class _Compiler:
    """Compiler of a target: an architecture, and each kernel compiled once for it."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._compiled: dict[tuple[Build, Any], Any] = {}

    def compile(self, build: Build, config: Any) -> Any:
        """What `build` makes of a configuration, once."""
        key = (build, config)
        if key not in self._compiled:
            self._compiled[key] = build(config, self.compiler_options())
        return self._compiled[key]

    def compiler_options(self) -> str:
        """Options of one compilation."""
        return ""


class Simulator(_Compiler):
    """Target `sim`: compiles for an architecture and runs instruction by instruction on the CPU.

    Args:
        has_lines: as of `compiler_options`.
    """

    device = "cpu"
    schedules = SCHEDULES

    def __init__(self, arch: str, has_lines: bool | None = None) -> None:
        super().__init__(arch)
        self._has_lines = has_lines

    @property
    def multiprocessors(self) -> int:
        """SMs of the simulated GPU."""
        from dsv4.simulator.api import MULTIPROCESSORS

        return MULTIPROCESSORS[self.arch]

    def compiler_options(self) -> str:
        return compiler_options(self.arch, self._has_lines)

    def compile(self, build: Build, config: Any) -> Any:
        from dsv4.simulator import named

        has_lines = "--generate-line-info" in self.compiler_options()
        with named() if has_lines else contextlib.nullcontext():
            return super().compile(build, config)

    def simulate(
        self,
        compiled: Any,
        call: Call,
        schedule: str = SCHEDULES[0],
        seed: int = 0,
        races: bool = True,
    ) -> Outcome:
        """Simulate a call; what the checker finds is in the report."""
        from dsv4.simulator import simulate

        call.poisoned()
        options = {"schedule": schedule, "seed": seed, "races": races}
        report = simulate(compiled, *call.args, **call.options, **options)
        return Outcome.of(call, report)

    def run(
        self,
        compiled: Any,
        call: Call,
        schedule: str = SCHEDULES[0],
        seed: int = 0,
        races: bool = True,
    ) -> Outcome:
        """Simulate a call and fail with what the checker finds."""
        outcome = self.simulate(compiled, call, schedule, seed, races)
        if races:
            assert_clean(outcome.report)
        return outcome


@functools.cache
def simulator(arch: str) -> Simulator:
    """The simulator that the tests of a process share, and with it what has been compiled."""
    return Simulator(arch)


class Device(_Caller, _Compiler):
    """Target `cuda`: compiles for the GPU of this machine and runs there."""

    device = "cuda"
    schedules = ("first run", "second run")

    def __init__(self) -> None:
        super().__init__(of_capability(torch.cuda.get_device_capability()).name)

    @property
    def multiprocessors(self) -> int:
        """SMs of the GPU."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def replay(self, compiled: Any, call: Call) -> Outcome:
        """Capture a call in a CUDA graph, poison its outputs, and replay it."""
        compiled(*call.args, **call.options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(*call.args, **call.options)
        call.poisoned()
        graph.replay()
        return Outcome.of(call)

    def on_streams(self, compiled: Any, calls: Sequence[Call], rounds: int = 20) -> list[Outcome]:
        """Launch calls at the same time, each on a stream of its own, again and again.

        Returns: what the last round left, by call.
        """
        streams = [torch.cuda.Stream() for _ in calls]
        for call in calls:
            call.poisoned()
        torch.cuda.synchronize()
        for _ in range(rounds):
            for call, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    compiled(*call.args, **call.options)
        torch.cuda.synchronize()
        return [Outcome.of(call) for call in calls]


def run_all(
    target: Target,
    compiled: Any,
    make: Callable[[], Call],
    seed: int = 0,
    schedules: Sequence[str] | None = None,
    **options: Any,
) -> Outcome:
    """Run a call, made anew each time, in every schedule of a target; outputs must agree in every
    bit. The last outcome."""
    schedules = target.schedules if schedules is None else schedules
    outcomes = [target.run(compiled, make(), name, seed, **options) for name in schedules]
    for name, outcome in zip(schedules, outcomes):
        outcomes[0].assert_same_bits(outcome, f"{schedules[0]} against {name}")
    return outcomes[-1]


def compiler_options(arch: str, has_lines: bool | None = None) -> str:
    """What the simulator needs of a compilation: the PTX, kept in a folder until the process ends.

    Args:
        has_lines: whether findings name the Python lines, too, for twice the time of compilation;
            by default where the environment variable `DSV4_SOURCE_LINES` is set.
    """
    has_lines = bool(os.environ.get(SOURCE_LINES)) if has_lines is None else has_lines
    folder = tempfile.mkdtemp(prefix="dsv4-ptx-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lines = "--generate-line-info " if has_lines else ""
    return f"--gpu-arch {arch} --keep-ptx {lines}--dump-dir {folder}"


def assert_clean(report: Report) -> None:
    """Fail with every race of a simulation, and with every fence of Tensor Memory that is missing:
    not a race by the order of barriers, but PTX promises tcgen05 no order without them."""
    from dsv4.simulator.races.tensor_memory import MISSING_FENCE

    report.raise_if_racy()
    unfenced = [str(found) for found in report.warnings if found.kind == MISSING_FENCE]
    assert not unfenced, "\n".join(unfenced)


def missed_synchronisation(reports: Iterable[Report]) -> dict[str, tuple[int, int]]:
    """How many barriers, fences and waits of each kernel entry no launch has executed, and how many
    it has; entries without any left are absent."""
    # Coverage adds up over launches: the latest of an entry is that of all.
    latest = {found.kernel: found for report in reports for found in report.coverage}
    return {
        name: (found.sync - found.sync_run, found.sync)
        for name, found in latest.items()
        if found.sync_run < found.sync
    }
