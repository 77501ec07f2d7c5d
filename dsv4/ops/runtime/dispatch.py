"""An operator's implementations by dispatch key, all from its declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import is_grad_enabled
from torch.autograd import forward_ad

from dsv4.ops.runtime import checks
from dsv4.ops.runtime.calls import tensors_of_call, unpack
from dsv4.ops.runtime.launch import Launch, launch_for, run_torch
from dsv4.ops.runtime.runner import config_of

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp


def implementations(op: KernelOp) -> tuple[Callable, Callable, Callable]:
    """Implementations for CPU, CUDA and fake tensors."""

    def cpu(*arguments: Any) -> None:
        config, tensors = unpack(op, arguments)
        op.check_no_gradients(*tensors)
        op.check(config, tensors)
        checks.check_aliasing(op.tensors, tensors)
        op.check_values(config, *tensors)
        run_torch(op, config, tensors)

    def fake(*arguments: Any) -> None:
        op.check(*unpack(op, arguments))

    return cpu, _cuda(op), fake


def _cuda(op: KernelOp) -> Callable[..., None]:
    """The hot path: what is compiled checks its arguments, and only a failure is explained."""
    place = op.num_required
    launches = op.launches
    known_launch = launches.get
    differentiable = [i for i, arg in enumerate(op.tensors[:place]) if arg.has_gradient]

    def cuda(*arguments: Any) -> None:
        if is_grad_enabled() or forward_ad._current_level >= 0:
            if len(arguments) > place + 1 or forward_ad._current_level >= 0:
                op.check_no_gradients(*tensors_of_call(op, arguments))
            for i in differentiable:
                if arguments[i] is not None and arguments[i].requires_grad:
                    op.check_no_gradients(*tensors_of_call(op, arguments))
        launch = known_launch(arguments[place])
        try:
            if launch is None:
                launch = bind(arguments)
            launch(*arguments)
        except Exception:
            # Compiled kernels check their arguments for free but name them tersely; checking here
            # before every launch would cost more than the launch.
            config, tensors = unpack(op, arguments)
            op.check(config, tensors)
            if arguments[place] in launches:
                checks.check_kernel_layout(op.tensors, op.values(config), tensors)
            raise

    def bind(arguments: tuple) -> Launch:
        """What runs calls with tensors like these; remembered where it serves all others."""
        runner_id = arguments[place]
        launch, is_kernel = launch_for(op, config_of(op, runner_id), arguments[0])
        if is_kernel:
            launches[runner_id] = launch
        return launch

    return cuda
