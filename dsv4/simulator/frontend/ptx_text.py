"""`simulate_ptx`: run one kernel given as PTX text, without a kernel compiler or host code."""

from __future__ import annotations

import functools
import struct

import torch

from dsv4.simulator.api import Simulation
from dsv4.simulator.machine.asynchronous import check_schedule
from dsv4.simulator.machine.scheduler import INSTRUCTIONS_PER_WARP, LaunchConfig
from dsv4.simulator.ptx.entry import Entry
from dsv4.simulator.ptx.parser import Module, parse_module
from dsv4.simulator.report import Report

Dimensions = tuple[int, ...] | int
Parameter = torch.Tensor | int | float | bytes


class _OneLaunch:
    """The host side of a single launch whose configuration is set before each run."""

    def __init__(self, module: Module, multiprocessors: int):
        self.config: LaunchConfig | None = None

    def run(self, arguments: list, keywords: dict) -> list[LaunchConfig]:
        return [self.config]


@functools.lru_cache(maxsize=64)
def _simulation(ptx: str) -> Simulation:
    return Simulation(parse_module(ptx), _OneLaunch)


def simulate_ptx(
    ptx: str,
    entry: str,
    *,
    grid: Dimensions,
    block: Dimensions,
    params: tuple[Parameter, ...],
    cluster: Dimensions | None = None,
    shared: int = 0,
    non_portable: bool = False,
    schedule: str = "eager",
    seed: int = 0,
    races: bool = True,
    instructions_per_warp: int = INSTRUCTIONS_PER_WARP,
    buffers: tuple[torch.Tensor, ...] = (),
    uninitialised: tuple[torch.Tensor, ...] = (),
    peers: tuple[tuple[Parameter, ...], ...] = (),
) -> Report:
    """Run one kernel of a PTX module on CPU tensors, in place.

    Args:
        ptx: a PTX module for sm_80 to sm_120, of any variant.
        entry: name of the `.entry` to launch.
        grid, block, cluster: CTAs of the grid, threads of a CTA, CTAs of a cluster (default: what
            the kernel was compiled for), (x, y, z), or x alone. A kernel that waits for its whole
            grid is launched cooperatively.
        params: one value per kernel parameter: a CPU tensor (its address), an integer, a float, or
            the parameter's bytes (a tensor map, a struct).
        shared: bytes of dynamic shared memory.
        non_portable: whether the kernel has the attribute that allows clusters of more than 8 CTAs.
        schedule, seed, races, instructions_per_warp: as of `simulate`.
        buffers: further tensors whose storages the kernel may touch, for example through tensor
            maps.
        uninitialised: as of `simulate`.
        peers: parameters of the same launch on further GPUs, which run at the same time and may
            touch each other's tensors: what they exchange needs the scope `.sys`.

    Returns: a Report with one launch.
    Raises: as `simulate`; ValueError for an entry or parameters the module does not have.
    """
    check_schedule(schedule)
    simulation = single_launch(
        ptx, entry, grid=grid, block=block, params=params, cluster=cluster, shared=shared,
        non_portable=non_portable, peers=peers,
    )  # fmt: skip
    tensors = tuple(p for given in (params, *peers) for p in given if isinstance(p, torch.Tensor))
    return simulation.run(
        tensors, {}, buffers, schedule, seed, races,
        instructions_per_warp=instructions_per_warp, uninitialised=uninitialised,
    )  # fmt: skip


def single_launch(
    ptx: str,
    entry: str,
    *,
    grid: Dimensions,
    block: Dimensions,
    params: tuple[Parameter, ...],
    cluster: Dimensions | None = None,
    shared: int = 0,
    non_portable: bool = False,
    peers: tuple[tuple[Parameter, ...], ...] = (),
) -> Simulation:
    """The simulation of one launch of a PTX module; arguments as of `simulate_ptx`."""
    simulation = _simulation(ptx)
    module = simulation.module
    if entry not in (*module.entries, *module.refused):
        raise ValueError(f"entry must be one of {', '.join(module.entries)}, got {entry!r}")
    found = module.entry(entry)
    values, *others = (_packed(found, given) for given in (params, *peers))
    cluster = (found.cluster or 1) if cluster is None else cluster
    sizes = (
        _xyz(name, given)
        for name, given in zip(("grid", "block", "cluster"), (grid, block, cluster))
    )
    simulation.host.config = LaunchConfig(
        entry,
        *sizes,
        shared,
        values,
        peers=tuple(others),
        cooperative=_waits_for_grid(found),
        non_portable=non_portable,
    )
    return simulation


def _waits_for_grid(entry: Entry) -> bool:
    """True for a kernel that asks where the grid's workspace is."""
    return any("%envreg" in operand for ins in entry.instructions for operand in ins.operands)


def _xyz(name: str, given: Dimensions) -> tuple[int, int, int]:
    """Three dimensions from one to three."""
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(f"{name} must be one to three positive integers, got {given!r}")
    return (*sizes, 1, 1)[:3]


def _packed(entry: Entry, params: tuple[Parameter, ...]) -> list[bytes]:
    """Parameters as the bytes of the entry's parameter space."""
    if len(params) != len(entry.params):
        raise ValueError(
            f"params must hold {len(entry.params)} values for {entry.name}, got {len(params)}"
        )
    out = []
    for (name, (_, size)), value in zip(entry.params.items(), params):
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        if isinstance(value, float):
            value = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
        if isinstance(value, int):
            value = (value % (1 << 8 * size)).to_bytes(size, "little")
        if len(value) != size:
            raise ValueError(f"parameter {name} must have {size} bytes, got {len(value)}")
        out.append(value)
    return out
