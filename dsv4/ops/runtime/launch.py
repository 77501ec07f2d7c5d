"""Launches of compiled kernels: no check that the kernel makes itself, no allocation after the
first call of a shape, no synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.kit.args import Workspace, optional_of
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import find_kernel
from dsv4.ops.runtime.calls import tensors_of_call
from dsv4.ops.runtime.checks import check_aliasing
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
    has_kernel = first.dtype not in other_dtypes(op) and op.has_kernel(config)
    device = find_kernel(op.name, op.kernels, first.get_device()) if has_kernel else None
    if device is not None and op.serves(config, device.arch):
        return state_of(op, config, first.device).launch, True

    def launch(*arguments: Any) -> None:
        tensors = tensors_of_call(op, arguments)
        op.check(config, tensors)
        check_aliasing(op.tensors, tensors)
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
    the GPU for a small one. What follows from the sizes of a launch is remembered by them.
    """
    op, config, run, index = state.op, state.config, state.run, state.device.index
    place, others = op.num_required, other_dtypes(op)
    places = tuple(sized_dimensions(op, config).values())
    plan, options = _planner(state), _options(state)
    has_one_size = len(places) == 1
    first_place, first_dimension = places[0] if places else (0, 0)
    plans: dict[tuple[int, ...] | int, _Plan] = {}
    known_plan = plans.get
    current_device, has_others = torch._C._cuda_getDevice, torch.cuda.device_count() > 1

    def launch(*arguments: Any) -> None:
        first = arguments[0]
        if first.dtype in others or (
            has_others and (current_device() != index or first.get_device() != index)
        ):
            pass_on(op, config, arguments)
            return
        if has_one_size:  # most operators: the number of tokens
            size = arguments[first_place].size(first_dimension)
        else:
            size = tuple([arguments[i].size(j) for i, j in places])
        planned = known_plan(size)
        if planned is None:
            if len(plans) == MAX_SIZES:
                plans.clear()
            planned = plans[size] = plan((size,) if has_one_size else size)
        if planned.is_empty:
            op.check(config, tensors_of_call(op, arguments))
        elif planned.workspace or len(arguments) > place + 1:
            run(*arguments[:place], *options(arguments, planned), *planned.scalars)
        else:
            run(*arguments[:place], *planned.tail)

    return launch


class _Plan(NamedTuple):
    """Scalars and workspace that follow from the sizes of a launch.

    Attributes:
        sizes: by name.
        is_empty: whether nothing is to be written.
        scalars: of the kernel's call.
        workspace: fp32 elements.
        absent: stand-ins for the optional tensors.
        tail: arguments after the required ones where no optional one is given.
    """

    sizes: dict[str, int]
    is_empty: bool
    scalars: tuple[int, ...] = ()
    workspace: int = 0
    absent: tuple[Tensor, ...] = ()
    tail: tuple = ()


def _planner(state: State) -> Callable[[tuple[int, ...]], _Plan]:
    op, config = state.op, state.config
    values = op.values(config)
    names = tuple(sized_dimensions(op, config))
    output = next(arg for arg in op.tensors if arg.is_output)
    inner = {name for arg in optional_of(op.args) for name in arg.shape[1:]}
    is_shaped = not inner.isdisjoint(set(names) - set(values))

    def plan(size: tuple[int, ...]) -> _Plan:
        sizes = dict(zip(names, size))
        if not all(values.get(name, sizes.get(name)) for name in output.shape):
            return _Plan(sizes, is_empty=True)
        scalars = op.plan(config, sizes, state.target)
        workspace = op.workspace_size(config, sizes, scalars)
        absent = state.absent
        if is_shaped:
            tensors = optional_of(op.args)
            absent = tuple(make.absent(arg, values, state.device, sizes) for arg in tensors)
        return _Plan(sizes, False, scalars, workspace, absent, (*absent, *scalars))

    return plan


def _options(state: State) -> Callable[[tuple, _Plan], list[Tensor]]:
    """The optional tensors of a launch, each absent one replaced."""
    op, start = state.op, state.op.num_required + 1
    table = tuple(enumerate(optional_of(op.args), start))

    def workspace(given: Tensor | None, rows: int, needed: int) -> Tensor:
        if given is None:
            return state.workspace(needed, rows)
        if given.numel() < needed:
            raise ValueError(f"workspace: got {given.numel()} elements, needs {needed}")
        return given

    def options(arguments: tuple, planned: _Plan) -> list[Tensor]:
        chosen, count = [], len(arguments)
        for (i, arg), absent in zip(table, planned.absent):
            tensor = arguments[i] if i < count else None
            if isinstance(arg, Workspace):
                needed = planned.workspace
                tensor = workspace(tensor, arguments[0].shape[0], needed) if needed else absent
            elif tensor is None:
                tensor = absent
            else:
                # The compiled function takes any number of rows, for none means absent.
                need = planned.sizes.get(arg.shape[0])
                if need is not None and tensor.shape[0] != need:
                    raise ValueError(f"{arg.label}: got {tensor.shape[0]} rows, needs {need}")
            chosen.append(tensor)
        return chosen

    return options
