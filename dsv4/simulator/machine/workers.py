"""Distribution of the clusters of a launch over processes.

Tensors move to shared memory for the run, so CTAs in different processes still communicate through
global memory; atomics take a lock. The checker sees each process alone. Where clusters of different
workers touch the same words, one of them writing, only a run in one process can tell whether they
are ordered: the launch is then run again like that, from the same memory.
"""

from __future__ import annotations

import itertools
import multiprocessing
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch

from dsv4.simulator import errors
from dsv4.simulator.machine.memory import Region
from dsv4.simulator.machine.scheduler import Launch, run_launch
from dsv4.simulator.races.cells.histories import Footprint
from dsv4.simulator.report import Finding


class SharedTensors:
    """Stand-ins of tensors in shared memory; tensors of one storage keep sharing it."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def share(self, value):
        """`value` with its tensors, at any depth of lists and tuples, replaced by stand-ins."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self.share(item) for item in value])
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found = self._storages.get(storage.data_ptr())
        if found is None:
            copy = storage.clone().share_memory_()
            found = self._storages[storage.data_ptr()] = (storage, copy)
        out = torch.empty(0, dtype=tensor.dtype)
        return out.set_(found[1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def copy_back(self) -> None:
        """Bring what kernels wrote into the caller's tensors."""
        for original, copy in self._storages.values():
            original.copy_(copy)


@contextmanager
def shared_arguments(*values, workers: int):
    """The values to run with: themselves for one worker, else stand-ins copied back afterwards."""
    if workers == 1:
        yield values
        return
    tensors = SharedTensors()
    yield tuple(tensors.share(list(v)) if not isinstance(v, dict) else
                {k: tensors.share(x) for k, x in v.items()} for v in values)  # fmt: skip
    tensors.copy_back()


def run_parallel(launch: Launch, workers: int) -> None:
    """Run every cluster of a launch, dealt to `workers` processes in turn.

    Raises what the first failing worker raised, as an error of the same class.
    """
    origins = list(enumerate(launch.cluster_origins()))
    workers = min(workers, len(origins))
    if workers < 2:
        run_launch(launch)
        return
    before = None
    if launch.monitor is not None:
        before = [(region, region.bytes.copy()) for region in launch.memory.regions]
    results = _run_workers(launch, [origins[k::workers] for k in range(workers)])
    for result in results:
        if result.error is not None:
            raise getattr(errors, result.error[0])(result.error[1])
    if before is None:
        return
    footprints = [result.footprints for result in results]
    if any(_meet(a, b) for a, b in itertools.combinations(footprints, 2)):
        _run_again(launch, before)
        return
    for result in results:
        launch.monitor.adopt(*result.found)
        launch.monitor.memory.adopt(launch.memory, result.footprints)
        launch.monitor.memory.waited |= result.waited


class _Result(NamedTuple):
    """Result of one worker."""

    error: tuple[str, str] | None  # class and message
    hits: list[int]
    guards: set[int]
    issued: dict[str, int]
    found: tuple[list[Finding], list[Finding]]
    footprints: dict[int, Footprint]
    waited: bool  # for the launches before


def _run_workers(launch: Launch, shares: list[list]) -> list[_Result]:
    context = multiprocessing.get_context("fork")
    launch.atomics_lock = context.Lock()
    launch.has_peers = True
    started = []
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(launch, share, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    results = []
    for process, connection in started:
        results.append(_collect(launch, connection))
        process.join()
    launch.has_peers = False
    return results


def _work(launch: Launch, mine: list, connection: Connection) -> None:
    """In a worker: run its clusters and report what the launch learnt."""
    program, monitor = launch.program, launch.monitor
    before = list(program.hits)
    error = None
    try:
        run_launch(launch, mine)
    except errors.SimulatorError as caught:
        error = (type(caught).__name__, str(caught))
    hits = [after - start for after, start in zip(program.hits, before)]
    found, footprints, waited = ([], []), {}, True
    if monitor is not None:
        found, footprints = (monitor.findings, monitor.warnings), monitor.memory.footprints()
        waited = monitor.memory.waited
    connection.send(
        _Result(error, hits, program.guards_taken, launch.issued, found, footprints, waited)
    )
    connection.close()


def _collect(launch: Launch, connection: Connection) -> _Result:
    """Add one worker's counts to the launch; its result."""
    try:
        result = connection.recv()
    except EOFError:
        died = ("SimulatorError", "a worker process died")
        return _Result(died, [], set(), {}, ([], []), {}, True)
    program = launch.program
    program.hits[:] = [a + b for a, b in zip(program.hits, result.hits)]
    program.guards_taken |= result.guards
    for kind, count in result.issued.items():
        launch.issued[kind] = launch.issued.get(kind, 0) + count
    return result


def _meet(a: dict[int, Footprint], b: dict[int, Footprint]) -> bool:
    return any(start in b and a[start].conflicts(b[start]) for start in a)


def _run_again(launch: Launch, before: list[tuple[Region, np.ndarray]]) -> None:
    """Run all clusters here, for the checker; what ran is counted already."""
    hits, issued = list(launch.program.hits), dict(launch.issued)
    for region, data in before:
        region.bytes[:] = data
    run_launch(launch)
    launch.program.hits[:], launch.issued = hits, issued
