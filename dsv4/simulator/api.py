"""`simulate`: run a compiled CuTeDSL function on a CPU."""

from __future__ import annotations

import contextlib
import functools
import mmap
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dsv4.simulator.compile.program import Program
from dsv4.simulator.coverage import coverage_of, instructions_run
from dsv4.simulator.errors import SimulatorError
from dsv4.simulator.frontend.cutedsl import HostRunner, argument_names
from dsv4.simulator.frontend.kernel_names import allocations_of
from dsv4.simulator.machine.asynchronous import check_schedule
from dsv4.simulator.machine.memory import GlobalMemory
from dsv4.simulator.machine.overlap import check_overlap, run_chain
from dsv4.simulator.machine.scheduler import INSTRUCTIONS_PER_WARP, Launch, LaunchConfig
from dsv4.simulator.machine.workers import run_parallel, shared_arguments
from dsv4.simulator.ptx.parser import Module, parse_module
from dsv4.simulator.ptx.shared_names import Allocation
from dsv4.simulator.races.monitor import Monitor
from dsv4.simulator.report import LaunchReport, Report

MULTIPROCESSORS = {"sm_100a": 148, "sm_90a": 132}  # of those that kernels here are compiled for
# Of the largest GPU of each family: A100, A40, L40, H100, B200, B300, RTX PRO 6000. That a family
# lacks an instruction is the compiler's business.
_FAMILIES = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188}
GRID_WORKSPACE = 4096  # bytes, for barriers of all CTAs of a cooperative launch
COMPILE_OPTIONS = "--keep-ptx --generate-line-info"


def multiprocessors_of(target: str) -> int:
    """Multiprocessors of a GPU that runs PTX of a target, such as sm_90a or sm_100f."""
    family = re.fullmatch(r"sm_(\d+)[af]?", target)
    if family is None or int(family.group(1)) not in _FAMILIES:
        known = ", ".join(f"sm_{number}" for number in _FAMILIES)
        raise SimulatorError(f"kernel compiled for {target or 'no target'}; simulated are {known}")
    return _FAMILIES[int(family.group(1))]


class Host(Protocol):
    """Stand-in for host code, which gives launches."""

    def run(self, arguments: list, keywords: dict) -> list[LaunchConfig]: ...


class Prepared(NamedTuple):
    """A launch that is about to run.

    Attributes:
        guessed: addresses [start, stop) that it may read before its wait, whoever writes them.
    """

    program: Program
    config: LaunchConfig
    multiprocessors: int
    guessed: tuple[tuple[int, int], ...] = ()


class Simulation:
    """A module and the host side that launches its kernels; programs are compiled once and kept.

    Args:
        module: the parsed PTX.
        host: makes the host side for a module and a multiprocessor count: an object whose
            `run(arguments, keywords)` gives the launches in order.
        argument_names: of positional arguments, as far as they are known.
        allocations: of dynamic shared memory by kernel, as far as they are known.
    """

    def __init__(
        self,
        module: Module,
        host: Callable[[Module, int], Host],
        argument_names: Sequence[str] = (),
        allocations: Mapping[str, Sequence[Allocation]] | None = None,
    ):
        self.module = module
        self.multiprocessors = multiprocessors_of(module.target)
        self.host = host(module, self.multiprocessors)
        self.argument_names, self.allocations = tuple(argument_names), allocations or {}
        self.programs: dict[str, Program] = {}
        self.variables: dict[str, tuple[int, np.ndarray]] = {}

    @classmethod
    def of_compiled(cls, compiled) -> Simulation:
        """The simulation of a function compiled by `cute.compile`."""
        ptx = getattr(getattr(compiled, "artifacts", None), "PTX", None)
        if not ptx:
            raise SimulatorError(
                "simulate needs the kernel's PTX: compile with "
                f'cute.compile(..., options="--gpu-arch sm_100a {COMPILE_OPTIONS}")'
            )
        host = functools.partial(HostRunner, compiled)
        return cls(parse_module(ptx), host, argument_names(compiled), allocations_of(compiled))

    def program(self, name: str) -> Program:
        """The program of one entry."""
        if name not in self.programs:
            entry = self.module.entry(name)
            for symbol in entry.symbols.values():
                if symbol.space == "global" and symbol.name not in self.variables:
                    data = _shared_bytes(max(symbol.size or 0, 1) + symbol.align)
                    start = -data.ctypes.data % symbol.align
                    data[start : start + len(symbol.init)] = np.frombuffer(symbol.init, np.uint8)
                    self.variables[symbol.name] = (data.ctypes.data + start, data)
            addresses = {k: v[0] for k, v in self.variables.items()}
            self.programs[name] = Program(entry, addresses, self.allocations.get(name, ()))
        return self.programs[name]

    def run(
        self, arguments, keywords, buffers, schedule: str, seed: int, races: bool = True,
        workers: int = 1, instructions_per_warp: int = INSTRUCTIONS_PER_WARP,
        uninitialised=(), overlap: str = "none", peers: Sequence[Sequence] = (),
    ) -> Report:  # fmt: skip
        """Run the host function, then each launch it made, in order."""
        check_overlap(overlap, races, workers)
        if overlap != "none" and peers:
            raise ValueError("overlap and peers cannot be simulated together")
        held = (arguments, keywords, buffers, peers, uninitialised)
        with shared_arguments(*held, workers=workers) as (*values, empty):
            memory = GlobalMemory()
            self.register(memory, *values)
            launches = self.prepare(memory, values[0], values[1], values[3])
            if overlap != "none":
                return run_overlapped(
                    memory, launches, schedule, seed, instructions_per_warp, overlap
                )
            undefined = tuple((x.data_ptr(), x.data_ptr() + x.nbytes) for x in empty)
            return run_in_order(
                memory, launches, schedule, seed, races, workers, instructions_per_warp, undefined
            )

    def register(
        self, memory: GlobalMemory, arguments, keywords: dict, buffers=(), peers=(), whose: str = ""
    ) -> None:
        """Make what a call gives, on all GPUs, accessible to kernels.

        Args:
            whose: a suffix of the tensors' names.
        """
        names = [*self.argument_names[: len(arguments)]]
        names += [f"argument {i}" for i in range(len(names), len(arguments))]
        for name, value in zip([*names, *keywords], [*arguments, *keywords.values()]):
            _register(memory, value, name + whose, whole=False)
        for gpu, given in enumerate(peers, 1):
            for i, value in enumerate(given):
                _register(memory, value, f"argument {i} of GPU {gpu}", whole=False)
        for i, value in enumerate(buffers):
            _register(memory, value, f"buffer {i}", whole=True)

    def prepare(self, memory: GlobalMemory, arguments, keywords: dict, peers=()) -> list[Prepared]:
        """What the host code launches, on all GPUs, in order."""
        configs = self.host.run(list(arguments), keywords)
        for given in peers:
            configs = [
                _side_by_side(config, other)
                for config, other in zip(configs, self.host.run(list(given), keywords), strict=True)
            ]
        for config in configs:
            if config.cooperative:
                data = _shared_bytes(GRID_WORKSPACE)
                config.workspace = data.ctypes.data
                memory.add(config.workspace, data.nbytes, "workspace of the grid", data)
            self.program(config.kernel)
            for name, (_, data) in self.variables.items():
                memory.add(data.ctypes.data, data.nbytes, f"variable {name}", data)
        return [
            Prepared(self.program(config.kernel), config, self.multiprocessors)
            for config in configs
        ]


def run_overlapped(
    memory: GlobalMemory, launches: Sequence[Prepared], schedule: str, seed: int,
    instructions_per_warp: int, overlap: str,
) -> Report:  # fmt: skip
    """Run launches of which some start early, unchecked."""
    started = [
        Launch(
            config, program, memory, schedule, seed, multiprocessors,
            instructions_per_warp=instructions_per_warp,
        )
        for program, config, multiprocessors, _ in launches
    ]  # fmt: skip
    before, start = [instructions_run(x.program) for x in started], time.perf_counter()
    early = run_chain(started, overlap, seed)
    seconds = time.perf_counter() - start
    described = [
        _described(launch, instructions_run(launch.program) - count, seconds)
        for launch, count in zip(started, before)
    ]
    return Report(described, early_starts=early)


def run_in_order(
    memory: GlobalMemory, launches: Sequence[Prepared], schedule: str, seed: int, races: bool,
    workers: int, instructions_per_warp: int, undefined: tuple[tuple[int, int], ...],
    before: Monitor | None = None,
) -> Report:  # fmt: skip
    """Run launches one after the other.

    Args:
        undefined: addresses [start, stop) that hold nothing yet.
        before: of what ran before them.
    """
    report = Report()
    for program, config, multiprocessors, guessed in launches:
        monitor = None
        if races:
            earlier = before if config.programmatic else None
            monitor = Monitor(program.entry, earlier, undefined, guessed)
        launch = Launch(config, program, memory, schedule, seed, multiprocessors, monitor)
        launch.instructions_per_warp = instructions_per_warp
        report.launches.append(_run(launch, workers))
        if monitor is not None:
            monitor.registers_never_written(program)
            report.races += monitor.findings
            report.warnings += monitor.warnings
        before = monitor
    return report


def _shared_bytes(size: int) -> np.ndarray:
    """Zeros that worker processes share."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _side_by_side(config: LaunchConfig, other: LaunchConfig) -> LaunchConfig:
    """One launch on the GPUs of both: they may differ in parameters alone."""
    same = replace(other, params=config.params, peers=config.peers)
    if same != config:
        raise ValueError(f"peers launch differently: {same} beside {config}")
    return replace(config, peers=(*config.peers, other.params))


def _run(launch: Launch, workers: int) -> LaunchReport:
    """Run one launch and describe it."""
    program = launch.program
    before, start = instructions_run(program), time.perf_counter()
    run_parallel(launch, workers)
    seconds = time.perf_counter() - start
    return _described(launch, instructions_run(program) - before, seconds)


def _described(launch: Launch, instructions: int, seconds: float) -> LaunchReport:
    program, config = launch.program, launch.config
    return LaunchReport(
        kernel=config.kernel,
        grid=config.grid,
        block=config.block,
        cluster=config.cluster,
        shared_bytes=config.shared + program.static_shared,
        instructions=instructions,
        operations=dict(launch.issued),
        seconds=seconds,
        coverage=coverage_of(program),
    )


_prepared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def simulate(
    compiled,
    *args,
    schedule: str = "eager",
    seed: int = 0,
    races: bool = True,
    workers: int = 1,
    instructions_per_warp: int = INSTRUCTIONS_PER_WARP,
    buffers: tuple[torch.Tensor, ...] = (),
    uninitialised: tuple[torch.Tensor, ...] = (),
    overlap: str = "none",
    peers: Sequence[Sequence] = (),
    **kwargs,
) -> Report:
    """Run a function compiled by `cute.compile` on CPU tensors, in place.

    Args:
        compiled: result of `cute.compile(...)` for sm_100a or sm_90a, compiled with
            `--keep-ptx` (and `--generate-line-info` to get Python lines in errors).
        args, kwargs: what the compiled function takes at run time: CPU tensors for tensor
            arguments (or CuTe tensors made from `CudaView`), numbers, streams. A kernel may touch
            a tensor from its first to its last element, and nothing else of its storage.
        schedule: "eager", "lazy" (asynchronous operations complete as late as possible) or
            "random" (seeded by `seed`).
        races: check happens-before of every access (about 3 times slower); see `Report.races`.
        workers: processes that share a launch's clusters.
        instructions_per_warp: what a warp may run in one launch before it counts as endless.
        buffers: further tensors whose storages the kernel may touch through pointers it gets
            another way.
        uninitialised: contiguous tensors, among the arguments or buffers, that hold nothing yet: a
            read of what no launch of this call has written is a finding.
        overlap: launches that programmatic dependent launch lets start early: "none", "all", or a
            "random" choice in a random order (seeded by `seed`); `Report.early_starts` counts them.
            Other than "none" it shows what results depend on, and needs races=False.
        peers: arguments of the same call on further GPUs (keywords are the same for all): their
            launches run at the same time and may touch each other's tensors; what they exchange
            needs the scope `.sys`.

    Returns: a Report; outputs are written to the tensors.
    Raises: UnsupportedInstruction, KernelFault, Deadlock, Endless; SimulatorError for a missing C
        compiler or an unsupported compiler version; ValueError for a bad argument.
    """
    check_schedule(schedule)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    return simulation_of(compiled).run(
        args, kwargs, buffers, schedule, seed, races, workers, instructions_per_warp, uninitialised,
        overlap, peers,
    )  # fmt: skip


def simulation_of(compiled) -> Simulation:
    """The simulation of a function compiled by `cute.compile`, made once."""
    try:
        simulation = _prepared.get(compiled)
    except TypeError:
        simulation = None
    if simulation is None:
        simulation = Simulation.of_compiled(compiled)
        with contextlib.suppress(TypeError):  # not every compiled object can be referred to weakly
            _prepared[compiled] = simulation
    return simulation


def _register(memory: GlobalMemory, value, name: str, whole: bool) -> None:
    """Make a tensor accessible to kernels: from its first to its last element, or the `whole`
    storage behind it."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device}, simulate takes CPU tensors")
        storage = value.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if whole and size:
            memory.add(start, size, name, value)
        elif value.numel():
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride()))
            extent = (last + 1) * value.element_size()
            memory.add_slice(value.data_ptr(), extent, start, size, name, value)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _register(memory, item, f"{name}[{i}]", whole)
