"""Time of a whole launch, and of the launches of a call, from recorded clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.simulator.api import Simulation
from dsv4.simulator.machine.occupancy import ctas_per_multiprocessor
from dsv4.simulator.timing.engine import Replay, Replayed, Span
from dsv4.simulator.timing.machine import MACHINES, Machine
from dsv4.simulator.timing.recorder import Choose, record
from dsv4.simulator.timing.trace import ClusterTrace, LaunchTrace
from dsv4.simulator.timing.units import MemoryRates


@dataclass(frozen=True)
class LaunchPrediction:
    """Modelled time of one launch.

    Attributes:
        waves: rounds of CTAs.
        microseconds: of the whole launch, its start and what the power limit costs included.
        cycles: from the first CTA's start to the last one's end, at the machine's clock.
        busy: cycles that each unit of an SM works, over all waves.
        waiting: cycles that the warps of one CTA wait, by what for (longest wave).
        spans: what each unit did when, in the first wave.
    """

    kernel: str
    ctas: int
    waves: int
    cycles: float
    microseconds: float
    busy: dict[str, float]
    waiting: dict[str, float]
    spans: list[Span]

    @property
    def critical_unit(self) -> str:
        """The unit that works longest."""
        return max(self.busy, key=self.busy.get)

    @property
    def bound(self) -> str:
        """The critical unit and how much of the time it works; the rest is latency."""
        return f"{self.critical_unit} {self.busy[self.critical_unit] / self.cycles:.0%}"


@dataclass(frozen=True)
class Prediction:
    """Modelled time of a call: its launches one after another."""

    machine: Machine
    launches: list[LaunchPrediction]

    @property
    def microseconds(self) -> float:
        """Of all launches."""
        return sum(launch.microseconds for launch in self.launches)

    @property
    def longest(self) -> LaunchPrediction:
        """The launch that takes most of the time."""
        return max(self.launches, key=lambda launch: launch.microseconds)


def some_clusters(count: int) -> Sequence[int]:
    """First, middle and last cluster, the first having most work under the usual schedules, and the
    neighbour of the middle one, to see what they share."""
    middle = count // 2 & ~1
    return sorted({0, middle, min(middle + 1, count - 1), count - 1})


def predict(
    compiled,
    *args,
    machine: Machine | None = None,
    choose: Choose = some_clusters,
    buffers: Sequence[torch.Tensor] = (),
    **kwargs,
) -> Prediction:
    """Model the time of one call of a compiled function.

    Args:
        compiled: as for `simulate`, or a `Simulation` of it.
        args, kwargs: of the function; CPU tensors. Only the chosen clusters run, so outputs are
            incomplete afterwards.
        machine: default: B200 for sm_100a, H200 for sm_90a.
        choose: clusters to record, given their number; they must not wait for other ones.
        buffers: further tensors that the kernels may touch through pointers they get another way.
    """
    simulation = compiled if isinstance(compiled, Simulation) else Simulation.of_compiled(compiled)
    if machine is None:
        machine = MACHINES[simulation.module.target]
    launches, written = [], 0.0
    for trace in record(simulation, args, kwargs, choose, buffers):
        launches.append(predict_launch(trace, machine, written))
        written += trace.stored(_side_by_side(trace, machine))
    return Prediction(machine, launches)


def predict_launch(trace: LaunchTrace, machine: Machine, written: float = 0.0) -> LaunchPrediction:
    """Model a launch: full waves as long as the mean cluster recorded of them, the last one as long
    as its longest, each with its share of L2 and memory bandwidth, and never shorter than what is
    stored takes.

    `written` bytes were stored just before; as far as L2 holds them they come from there.
    """
    side_by_side = _side_by_side(trace, machine)
    stored = trace.stored(side_by_side)
    distinct = _memory_fraction(trace.loaded(side_by_side), trace.footprint, machine, written)
    places = machine.multiprocessors // trace.cluster_size  # multiprocessors, or groups of them
    count = -(-(trace.ctas // trace.cluster_size) // side_by_side)
    waves: list[tuple[int, Replayed, float]] = []  # how many, longest replay, cycles of each
    worked = 0.0  # by the tensor pipes of all SMs
    groups = trace.waves(side_by_side)
    for clusters, recorded in groups:
        n = max(clusters // side_by_side, 1)
        active = min(clusters, places) * trace.cluster_size
        rates = _memory_rates(trace, machine, active, distinct, count)
        depth = -(-min(clusters, side_by_side) // places)
        replays = _replays(trace, recorded, machine, depth, rates)
        longest = max(replays, key=lambda r: r.cycles)
        each = sum(r.cycles for r in replays) / len(replays)
        if n == 1 and recorded is groups[-1][1]:
            each = longest.cycles
        waves.append((n, longest, each))
        worked += n * active * longest.busy["tensor pipe"]
    cycles = sum(n * each for n, _, each in waves) + (count - 1) * machine.cta_start
    cycles = max(cycles, stored / (machine.store_bytes * machine.multiprocessors))
    busy: dict[str, float] = {}
    for n, replay, _ in waves:
        for unit, taken in replay.busy.items():
            busy[unit] = busy.get(unit, 0.0) + n * taken
    return LaunchPrediction(
        kernel=trace.config.kernel,
        ctas=trace.ctas,
        waves=count,
        cycles=cycles,
        microseconds=_launch_us(trace, machine)
        + machine.microseconds(cycles)
        + _throttling(machine, cycles, worked / machine.multiprocessors),
        busy=busy,
        waiting=waves[0][1].waiting,
        spans=waves[0][1].spans,
    )


def _replays(
    trace: LaunchTrace,
    recorded: Sequence[ClusterTrace],
    machine: Machine,
    depth: int,
    rates: MemoryRates,
) -> list[Replayed]:
    """Each of some recorded clusters, `depth` copies of it sharing their SMs."""
    placement = [list(range(trace.cluster_size))] * depth
    return [
        Replay(trace.program, [cluster] * depth, placement, machine, rates).run()
        for cluster in recorded
    ]


def _memory_rates(
    trace: LaunchTrace, machine: Machine, active: int, distinct: float, waves: int
) -> MemoryRates:
    """What each of `active` SMs gets, `distinct` of it from memory.

    The two SMs of a pair ask L2 once for what both load at the same time: measured on an H200, and
    taken for granted elsewhere. CTAs of a single wave store their results at the same time; after
    that they are out of step, and each has L2 to itself while others load.
    """
    part = machine.multiprocessors / active
    share = machine.hbm_bytes / active
    l2 = min(machine.l2_port_bytes, machine.l2_bytes * part)
    loads = min(machine.landing_bytes, l2 / trace.pair_fraction)
    if distinct:
        loads = min(loads, share / distinct)
    multicast = 1 / (distinct / min(loads, machine.multicast_bytes) + (1 - distinct) / loads)
    memory = min(1.0, loads * distinct / share)
    stores = machine.store_port_bytes
    if waves == 1:
        stores = min(stores, machine.store_bytes * part)
    return MemoryRates(loads, multicast, stores, memory)


def _throttling(machine: Machine, cycles: float, worked: float) -> float:
    """Microseconds that tensor pipes which work for `worked` of the cycles lose to the power limit:
    they slow down with the clock, memory does not."""
    sustained = machine.sustained_ghz(worked / cycles)
    return 1e-3 * worked * (1 / sustained - 1 / machine.clock_ghz)


def _memory_fraction(loaded: float, footprint: int, machine: Machine, written: float) -> float:
    """Part of the loaded bytes that memory has to deliver.

    CTAs that load the same bytes get them from memory once and from L2 afterwards: memory has to
    deliver no more than the footprint, and nothing that L2 still holds.
    """
    if not loaded:
        return 0.0
    held = written if written <= machine.l2_capacity else 0.0
    return max(0.0, min(loaded, footprint) - held) / loaded


def _side_by_side(trace: LaunchTrace, machine: Machine) -> int:
    """Clusters that run at the same time."""
    return machine.multiprocessors // trace.cluster_size * _ctas_per_sm(trace, machine)


def _ctas_per_sm(trace: LaunchTrace, machine: Machine) -> int:
    """CTAs that fit an SM by shared memory and threads."""
    x, y, z = trace.config.block
    return ctas_per_multiprocessor(x * y * z, trace.shared_bytes, machine.shared_memory)


def _launch_us(trace: LaunchTrace, machine: Machine) -> float:
    waits = any(ins.opcode == "griddepcontrol.wait" for ins in trace.program.entry.instructions)
    launch = machine.dependent_launch_us if waits else machine.launch_us
    return launch + machine.first_access_us
