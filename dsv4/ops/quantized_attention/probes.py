"""Smallest calls of both operators' kernels, with all that a configuration reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.runtime import state as states
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.kernel_op import KernelOp


def probes_of(
    op: KernelOp, config: Any, target: Device, device: torch.device
) -> Iterator[tuple[Tensor | int, ...]]:
    """A query, a key, or both; packed, in one sequence."""
    sizes = dict.fromkeys(states.sized_dimensions(op, config), 1) | {"N": 1, "N1": 2}
    call = list(states.smallest_call(op, config, op.plan(config, sizes, target), device))
    for place, arg in enumerate(op.tensors):
        if arg.is_optional and op.needs(config, arg.name):
            call[place] = make.empty(arg, op.values(config), sizes, device).zero_()
    yield tuple(call)
