"""Choice of an operator's implementation on a CUDA device: its kernel, or plain torch."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from typing import NamedTuple

import torch

from dsv4 import arch
from dsv4.quoting import quoted

VARIABLE = "DSV4_OPS"


class Device(NamedTuple):
    """Device that a launch is planned for.

    Attributes:
        arch: name of the architecture.
        num_sms: SMs of the device.
    """

    arch: str
    num_sms: int


def torch_is_chosen() -> bool:
    """Whether `DSV4_OPS=torch` selects the torch implementation of every operator.

    Looked up where a kernel would be bound to a configuration, so it must be set before the first
    call; what is bound stays.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "torch"):
        raise ValueError(f"{VARIABLE}: got {quoted(chosen)}, needs 'torch', or not to be set")
    return chosen == "torch"


@cache
def device_of(index: int) -> Device | None:
    """Architecture and size of a CUDA device; None where no kernel is compiled for it."""
    known = arch.of_capability(torch.cuda.get_device_capability(index))
    if known is None:
        return None
    return Device(known.name, torch.cuda.get_device_properties(index).multi_processor_count)


def find_kernel(op_name: str, kernels: dict[str, str], index: int) -> Device | None:
    """The device whose kernel serves an operator; None, with one warning, where torch must."""
    if torch_is_chosen():
        return None
    device = device_of(index)
    if device is None or device.arch not in kernels:
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        return _fall_back(op_name, f"there is no kernel for {name} (sm_{major}{minor})")
    try:
        # What compiles and loads kernels takes seconds to import: only once a GPU is really used.
        importlib.import_module("cutlass")
    except ImportError as error:
        name = torch.cuda.get_device_name(index)
        return _fall_back(op_name, f"the kernels for {name} cannot be loaded ({error})")
    return device


@cache
def _fall_back(op_name: str, reason: str) -> None:
    """Warn, once for each reason."""
    warnings.warn(
        f"{op_name}: {reason}; the slower torch implementation is used",
        RuntimeWarning,
        stacklevel=3,
    )
