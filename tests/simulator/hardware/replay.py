"""Runs a case in the simulator."""

from __future__ import annotations

import numpy as np
import torch

from dsv4.simulator import Report, simulate_ptx
from tests.simulator.hardware.case import Buffer, Case, TensorMap
from tests.simulator.hardware.tensor_maps import encode

_ALIGNMENT = 256  # what a GPU allocation has


def aligned(data: np.ndarray) -> torch.Tensor:
    """A tensor with the bytes of `data`, aligned as device memory is."""
    raw = torch.zeros(data.nbytes + _ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % _ALIGNMENT
    out = raw[start : start + data.nbytes]
    out.copy_(torch.from_numpy(data.view(np.uint8).reshape(-1).copy()))
    return out


def replay(case: Case, schedule: str = "eager", seed: int = 0) -> np.ndarray:
    """The output image of a case, from the simulator without its checker."""
    return simulated(case, schedule=schedule, seed=seed, races=False)[0]


def simulated(case: Case, **options) -> tuple[np.ndarray, Report]:
    """The output image of a case and the simulation's report; options as of `simulate_ptx`."""
    tensors = [aligned(buffer) for buffer in case.buffers]
    params = []
    for p in case.params:
        if isinstance(p, Buffer):
            params.append(tensors[p.index].data_ptr() + p.offset)
        elif isinstance(p, TensorMap):
            params.append(encode(p, tensors[p.buffer].data_ptr()))
        else:
            params.append(p)
    report = simulate_ptx(
        case.ptx,
        "kernel",
        grid=(case.grid, 1, 1),
        block=(case.block, 1, 1),
        cluster=(case.cluster, 1, 1),
        shared=case.shared,
        params=tuple(params),
        buffers=tuple(tensors),
        **options,
    )
    return tensors[0].numpy(), report
