"""The arguments of an operator's call, in the order of its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsv4.ops.runtime.runner import config_of

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp


def tensors_of_call(op: KernelOp, arguments: tuple) -> tuple[Tensor | None, ...]:
    """The tensors, in the order of the table.

    The dispatcher leaves out trailing arguments that have their default.
    """
    place = op.num_required
    tensors = (*arguments[:place], *arguments[place + 1 :])
    return (*tensors, *(None,) * (len(op.tensors) - len(tensors)))


def unpack(op: KernelOp, arguments: tuple) -> tuple[Any, tuple[Tensor | None, ...]]:
    """Configuration, and tensors in the order of the table; ValueError for a foreign runner id."""
    return config_of(op, arguments[op.num_required]), tensors_of_call(op, arguments)
