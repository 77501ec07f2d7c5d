"""`simulate_chain`: calls of several compiled functions on one stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.simulator.api import Prepared, Simulation, run_in_order, run_overlapped, simulation_of
from dsv4.simulator.machine.asynchronous import check_schedule
from dsv4.simulator.machine.memory import GlobalMemory
from dsv4.simulator.machine.overlap import check_overlap
from dsv4.simulator.machine.scheduler import INSTRUCTIONS_PER_WARP
from dsv4.simulator.races.monitor import Monitor
from dsv4.simulator.report import Report


@dataclass(frozen=True)
class ChainCall:
    """A call of a compiled function.

    Attributes:
        function: what `cute.compile` made, or the simulation of it.
        args, kwargs: CPU tensors, numbers, streams, as `simulate` takes them.
        guessed: tensors among them that strong loads may read before `griddepcontrol.wait`, whoever
            writes them: the kernel says that it compares them with what is there behind it.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    guessed: Sequence[torch.Tensor] = ()

    @property
    def simulation(self) -> Simulation:
        """That of the function."""
        is_made = isinstance(self.function, Simulation)
        return self.function if is_made else simulation_of(self.function)


def simulate_chain(
    calls: Sequence[ChainCall],
    *,
    schedule: str = "eager",
    seed: int = 0,
    races: bool = True,
    overlap: str = "none",
    recycled: Sequence[torch.Tensor] = (),
    instructions_per_warp: int = INSTRUCTIONS_PER_WARP,
) -> Report:
    """Run calls one after the other on one stream, in place.

    Args:
        calls: in the order of the stream; what one writes may be what another one reads.
        schedule, seed, races, overlap, instructions_per_warp: as of `simulate`.
        recycled: tensors in memory that launches before the chain may still read and write, as
            where an allocator gives memory of one tensor to the next. What touches them before
            `griddepcontrol.wait` is a race: a store of an output, even if no call of the chain
            reads it before.

    Returns: one Report of all launches; outputs are written to the tensors.
    Raises: as `simulate`.
    """
    check_schedule(schedule)
    check_overlap(overlap, races)
    memory, launches = GlobalMemory(), []
    for number, call in enumerate(calls):
        call.simulation.register(memory, call.args, dict(call.kwargs), whose=f" of call {number}")
    for call in calls:
        guessed = tuple(_range_of(x) for x in call.guessed if x.numel())
        prepared = call.simulation.prepare(memory, call.args, dict(call.kwargs))
        launches += [launch._replace(guessed=guessed) for launch in prepared]
    if overlap != "none":
        return run_overlapped(memory, launches, schedule, seed, instructions_per_warp, overlap)
    before = _touching(launches[0], memory, recycled) if races and launches else None
    return run_in_order(
        memory, launches, schedule, seed, races, 1, instructions_per_warp, (), before
    )


def _touching(like: Prepared, memory: GlobalMemory, tensors: Sequence[torch.Tensor]) -> Monitor:
    """A launch of the same kernel that read and wrote every byte of these tensors."""
    monitor = Monitor(like.program.entry)
    for tensor in tensors:
        if tensor.numel():
            region = memory.find(tensor.data_ptr(), tensor.data_ptr() + 1)
            start, stop = _range_of(tensor)
            monitor.memory.history(region).touch(start - region.start, stop - region.start)
    return monitor


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [start, stop) of a tensor's elements."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
