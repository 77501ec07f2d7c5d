"""Spreading the clusters of a launch over processes.

Tensors move to shared memory for the run, so CTAs in different processes still communicate through
global memory; atomics take a lock. The checker sees each process alone: races between clusters that
run in different workers are not found.
"""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from dsv4.simulator import errors
from dsv4.simulator.scheduler import Launch, run_launch


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
    context = multiprocessing.get_context("fork")
    launch.atomics_lock = context.Lock()
    launch.has_peers = True
    started = []
    for k in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(launch, origins[k::workers], theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    failure = None
    for process, connection in started:
        failure = _collect(launch, connection) or failure
        process.join()
    if failure is not None:
        raise failure


def _work(launch: Launch, mine: list, connection: Connection) -> None:
    """In a worker: run its clusters and report what the launch learnt."""
    program = launch.program
    before = list(program.hits)
    error = None
    try:
        run_launch(launch, mine)
    except errors.SimulatorError as caught:
        error = (type(caught).__name__, str(caught))
    hits = [after - start for after, start in zip(program.hits, before)]
    monitor = launch.monitor
    found = (monitor.findings, monitor.warnings) if monitor is not None else ([], [])
    connection.send((error, hits, program.guards_taken, launch.issued, found))
    connection.close()


def _collect(launch: Launch, connection: Connection) -> errors.SimulatorError | None:
    """Add one worker's report to the launch; the error it ended with, if any."""
    try:
        error, hits, guards, issued, found = connection.recv()
    except EOFError:
        return errors.SimulatorError("a worker process died")
    program = launch.program
    program.hits[:] = [a + b for a, b in zip(program.hits, hits)]
    program.guards_taken |= guards
    for kind, count in issued.items():
        launch.issued[kind] = launch.issued.get(kind, 0) + count
    if launch.monitor is not None:
        launch.monitor.adopt(*found)
    return getattr(errors, error[0])(error[1]) if error else None
