"""State of a configuration's launches on one device: made once, then only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.kernels.kit.args import Workspace, optional_of, required_of
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime import workspace as workspaces
from dsv4.ops.runtime.backend import Device, device_of
from dsv4.ops.runtime.cache import RUNNERS, Runner
from dsv4.ops.runtime.registry import compile_key

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp

# By operator, configuration object and device: configurations are few and never freed.
_STATES: dict[tuple[str, int, int], State] = {}


class State:
    """A configuration's compiled kernel on one device.

    Attributes:
        target: architecture and SMs of the device.
        run: the compiled function.
        absent: tensors without rows that stand for the optional ones.
        launch: runs it, `launch(required tensors, runner id, optional tensors)`.
    """

    def __init__(self, op: KernelOp, config: Any, device: torch.device) -> None:
        self.op = op
        self.config = config
        self.device = device
        self.target: Device = device_of(device.index)
        key = compile_key(op, config, self.target.arch)
        self.run: Runner = RUNNERS.get(key, before_miss=self.refuse_cold_capture)
        values = op.values(config)
        self.absent = tuple(make.absent(arg, values, device) for arg in optional_of(op.args))
        self.launch: Callable[..., None] = op.make_launch(self)

    def workspace(self, size: int, rows: int) -> Tensor:
        """Workspace of a launch of `rows` rows that needs `size` elements."""
        # Rounded up, so that a batch that grows by one outgrows few workspaces.
        most = self.op.max_workspace_size(self.config, 1 << (rows - 1).bit_length(), self.target)
        return workspaces.workspace(self.op.name, self.device, size, most, self.refuse_cold_capture)

    def refuse_cold_capture(self) -> None:
        """Raise when the current stream is being captured."""
        refuse_cold_capture(self.op, self.config)


def refuse_cold_capture(op: KernelOp, config: Any) -> None:
    """Raise when the current stream is being captured: a cold runner cannot start then.

    Compiling, loading a module and zeroing a workspace are illegal during a capture, and would end
    in an opaque CUDA error or an empty graph.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op.name}: this runner is cold and a CUDA graph is being captured; "
            f"{op.warmup_hint(config)} before the capture"
        )


def state_of(op: KernelOp, config: Any, device: torch.device) -> State:
    """State of a configuration on a device with an index, made once.

    Raises:
        RuntimeError: the runner is cold and a graph is being captured.
    """
    key = (op.name, id(config), device.index)
    if key not in _STATES:
        _STATES[key] = State(op, config, device)
    return _STATES[key]


def warm_up(op: KernelOp, config: Any, rows: int, device: torch.device) -> None:
    """Load the kernel and make the workspaces of the current stream and of later captures."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.device(device):
        state = state_of(op, config, device)
        size = op.max_workspace_size(config, rows, state.target)
        if size:
            workspaces.reserve(op.name, device, torch.cuda.current_stream().cuda_stream, size)
        # The driver loads a kernel on its first launch, which is not allowed during a capture.
        for arguments in op.probes(config, state.target, device):
            state.run(*arguments)


def sized_dimensions(op: KernelOp, config: Any) -> dict[str, tuple[int, int]]:
    """Where the sizes that are known at run time are read: tensor and dimension, by name.

    Those of nullable tensors are not among them.
    """
    values = op.values(config)
    found: dict[str, tuple[int, int]] = {}
    for place, arg in enumerate(required_of(op.args)):
        if arg.nullable:
            continue
        for dimension, name in enumerate(arg.shape):
            if name not in values:
                found.setdefault(name, (place, dimension))
    return found


def smallest_call(
    op: KernelOp, config: Any, scalars: tuple[int, ...], device: torch.device
) -> tuple[Tensor | int, ...]:
    """Arguments of a compiled call of size 1 in every dimension, zeros, no optional tensors."""
    values = op.values(config)
    sizes = dict.fromkeys(sized_dimensions(op, config), 1)
    required = [
        make.absent(arg, values, device)
        if arg.nullable
        else make.empty(arg, values, sizes, device).zero_()
        for arg in required_of(op.args)
    ]
    optional = [make.absent(arg, values, device, sizes) for arg in optional_of(op.args)]
    for place, arg in enumerate(optional_of(op.args)):
        if isinstance(arg, Workspace):
            size = op.workspace_size(config, sizes, scalars)
            optional[place] = torch.zeros(size, dtype=torch.float32, device=device)
    return (*required, *optional, *scalars)


def smallest_calls(
    op: KernelOp, config: Any, target: Device, device: torch.device
) -> Iterator[tuple[Tensor | int, ...]]:
    """The one smallest call, as planned."""
    sizes = dict.fromkeys(sized_dimensions(op, config), 1)
    yield smallest_call(op, config, op.plan(config, sizes, target), device)
