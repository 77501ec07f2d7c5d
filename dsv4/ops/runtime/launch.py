"""Launches of compiled kernels: no check that the kernel makes itself, no allocation after the
first call of a shape, no synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.kernels.kit.args import Workspace, optional_of, scalars_of
from dsv4.ops.runtime.backend import find_kernel
from dsv4.ops.runtime.calls import tensors_of_call
from dsv4.ops.runtime.state import State, sized_dimensions, state_of

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp

# launch(required tensors, runner id, optional tensors) -> None, with unchecked arguments; trailing
# optional ones may be missing. It must refuse by itself whatever it cannot run.
Launch = Callable[..., None]

# Launch sizes whose plan is remembered.
MAX_SIZES = 4096


def launch_for(op: KernelOp, config: Any, first: Tensor) -> tuple[Launch, bool]:
    """What runs calls whose first tensor is like this one, and whether that is a kernel."""
    # Kernels have one dtype. A model loaded in float32 is there to be exact, not fast.
    has_kernel_dtype = first.dtype not in other_dtypes(op)
    if has_kernel_dtype and find_kernel(op.name, op.kernels, first.get_device()) is not None:
        return state_of(op, config, first.device).launch, True

    def launch(*arguments: Any) -> None:
        tensors = tensors_of_call(op, arguments)
        op.check(config, tensors)
        run_torch(op, config, tensors)

    return launch, False


def other_dtypes(op: KernelOp) -> tuple[torch.dtype, ...]:
    """Dtypes of the first tensor that only the torch implementation takes."""
    return tuple(getattr(torch, name) for name in op.tensors[0].also)


def run_torch(op: KernelOp, config: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Run the torch implementation; dtypes are the tensors', whatever autocast says."""
    pairs = zip(op.tensors, tensors, strict=True)
    own = [tensor for arg, tensor in pairs if not isinstance(arg, Workspace)]
    with torch.autocast(tensors[0].device.type, enabled=False):
        op.torch(config, *own)


def pass_on(op: KernelOp, config: Any, arguments: tuple) -> None:
    """Launch what is for the first tensor's dtype on its device."""
    # The driver launches on the current device, whatever device the tensors are on.
    with torch.cuda.device(arguments[0].device):
        launch_for(op, config, arguments[0])[0](*arguments)


def make_launch(state: State) -> Launch:
    """The launch that follows from an operator's table.

    A closure: locals are found faster than attributes, and the host takes longer for a launch than
    the GPU for a small one.
    """
    op, config, run, index = state.op, state.config, state.run, state.device.index
    place, others = op.num_required, other_dtypes(op)
    output = next(i for i, arg in enumerate(op.tensors) if arg.is_output)
    sized = sized_dimensions(op, config)
    plan = _plans(state, sized) if scalars_of(op.args) else None
    options = _options(state, sized) if op.num_optional else None
    current_device, has_others = torch._C._cuda_getDevice, torch.cuda.device_count() > 1

    def launch(*arguments: Any) -> None:
        first = arguments[0]
        if first.dtype in others or (
            has_others and (current_device() != index or first.get_device() != index)
        ):
            pass_on(op, config, arguments)
            return
        if arguments[output].numel() == 0:
            op.check(config, tensors_of_call(op, arguments))
            return
        scalars = () if plan is None else plan(arguments)
        if options is None:
            run(*arguments[:place], *scalars)
        else:
            run(*arguments[:place], *options(arguments, scalars), *scalars)

    return launch


def _plans(state: State, sized: dict[str, tuple[int, int]]) -> Callable[..., tuple[int, ...]]:
    """The scalars of a launch by its arguments, remembered by sizes."""
    op, config, target = state.op, state.config, state.target
    plans: dict[tuple[int, ...], tuple[int, ...]] = {}
    places = tuple(sized.values())

    def plan(arguments: tuple) -> tuple[int, ...]:
        size = tuple([arguments[i].shape[j] for i, j in places])
        scalars = plans.get(size)
        if scalars is None:
            if len(plans) == MAX_SIZES:
                plans.clear()
            scalars = plans[size] = op.plan(config, dict(zip(sized, size)), target)
        return scalars

    return plan


def _options(state: State, sized: dict[str, tuple[int, int]]) -> Callable[..., list[Tensor]]:
    """The optional tensors of a launch by its arguments and scalars, each absent one replaced."""
    op, config, start = state.op, state.config, state.op.num_required + 1
    table = [
        (start + i, arg, state.absent[i], sized.get(arg.shape[0]))
        for i, arg in enumerate(optional_of(op.args))
    ]

    def workspace(given: Tensor | None, absent: Tensor, arguments: tuple, scalars: tuple) -> Tensor:
        sizes = {name: arguments[i].shape[j] for name, (i, j) in sized.items()}
        needed = op.workspace_size(config, sizes, scalars)
        if not needed:
            return absent
        if given is None:
            return state.workspace(needed, arguments[0].shape[0])
        if given.numel() < needed:
            raise ValueError(f"workspace: got {given.numel()} elements, needs {needed}")
        return given

    def options(arguments: tuple, scalars: tuple[int, ...]) -> list[Tensor]:
        chosen, count = [], len(arguments)
        for i, arg, absent, rows in table:
            tensor = arguments[i] if i < count else None
            if isinstance(arg, Workspace):
                tensor = workspace(tensor, absent, arguments, scalars)
            elif tensor is None:
                tensor = absent
            elif rows is not None and tensor.shape[0] != arguments[rows[0]].shape[rows[1]]:
                # The compiled function takes any number of rows, for none means absent.
                need = arguments[rows[0]].shape[rows[1]]
                raise ValueError(f"{arg.label}: got {tensor.shape[0]} rows, needs {need}")
            chosen.append(tensor)
        return chosen

    return options
