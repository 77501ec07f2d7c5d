"""Checks of an operator's tensors against its argument table.

Each error names the argument, what it got and what it needs. Only metadata is looked at, which
never synchronises and works on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.kit.args import TensorArg, Values, Workspace
from dsv4.quoting import quoted

Tensors = Sequence[Tensor | None]


def check_are_tensors(args: Sequence[TensorArg], tensors: Tensors) -> None:
    """Refuse what is no tensor, or none with strides: TypeError."""
    for arg, tensor in zip(args, tensors, strict=True):
        if tensor is not None or not arg.may_be_none:
            check_is_tensor(arg.label, tensor)


def check_is_tensor(name: str, tensor: object) -> None:
    """Refuse what is no tensor, or none with strides: TypeError."""
    if not isinstance(tensor, Tensor):
        kind = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise TypeError(f"{name}: got {kind}, needs a torch.Tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, needs torch.strided")
    if tensor.is_quantized:
        raise TypeError(f"{name}: got {tensor.dtype}, needs a tensor without quantiser")


def check_ranks(args: Sequence[TensorArg], tensors: Tensors) -> None:
    """Check the number of dimensions, before any size is read off them: ValueError."""
    for arg, tensor in zip(args, tensors, strict=True):
        if tensor is not None and tensor.dim() != len(arg.shape):
            raise ValueError(
                f"{arg.label}: got shape {quoted(tensor.shape)}, needs [{', '.join(arg.shape)}]"
            )


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got a {type(value).__name__}, needs True or False")


def check_arguments(args: Sequence[TensorArg], values: Values, tensors: Tensors) -> None:
    """Check dtypes, devices, shapes and strides: TypeError or ValueError.

    A size that `values` does not fix is taken from the first tensor that has it.
    """
    check_are_tensors(args, tensors)
    first = tensors[0]
    sizes: dict[str, int] = {}
    shared_dtype = _shared_dtype(args, values, tensors)
    for arg, tensor in zip(args, tensors, strict=True):
        if tensor is None:
            continue
        needed = shared_dtype if arg.also else getattr(torch, arg.dtype_in(values))
        if tensor.dtype != needed:
            raise TypeError(f"{arg.label}: got {tensor.dtype}, needs {needed}")
        if tensor.device != first.device:
            raise ValueError(
                f"{arg.label}: got a tensor on {tensor.device}, {args[0].name} is on {first.device}"
            )
        _check_shape(arg, tensor, values, sizes)
        _check_contiguous_rows(arg, tensor)
        if arg.is_output:
            _check_not_expanded(arg, tensor)


def _shared_dtype(args: Sequence[TensorArg], values: Values, tensors: Tensors) -> torch.dtype:
    """The dtype of all arguments that may have several: that of the first of them."""
    for arg, tensor in zip(args, tensors, strict=True):
        if arg.also and tensor is not None:
            allowed = [getattr(torch, name) for name in (arg.dtype_in(values), *arg.also)]
            if tensor.dtype not in allowed:
                needs = " or ".join(map(str, allowed))
                raise TypeError(f"{arg.label}: got {tensor.dtype}, needs {needs}")
            return tensor.dtype
    return torch.float32


def _check_shape(arg: TensorArg, tensor: Tensor, values: Values, sizes: dict[str, int]) -> None:
    if isinstance(arg, Workspace):
        return
    needed = [values.get(name, sizes.get(name)) for name in arg.shape]
    actual = tensor.shape
    if len(actual) != len(needed) or any(
        need is not None and got != need for got, need in zip(actual, needed)
    ):
        known = (name if need is None else str(need) for name, need in zip(arg.shape, needed))
        raise ValueError(f"{arg.label}: got shape {quoted(actual)}, needs [{', '.join(known)}]")
    sizes.update(zip(arg.shape, actual))


def _check_contiguous_rows(arg: TensorArg, tensor: Tensor) -> None:
    if tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{arg.label}: got strides {quoted(tensor.stride())}, "
            "the last dimension must be contiguous"
        )


def _check_not_expanded(arg: TensorArg, tensor: Tensor) -> None:
    if any(step == 0 and extent > 1 for step, extent in zip(tensor.stride(), tensor.shape)):
        raise ValueError(
            f"{arg.label}: got strides {quoted(tensor.stride())} for shape {quoted(tensor.shape)}, "
            "an output needs an element of its own for every index"
        )


def check_aliasing(args: Sequence[TensorArg], tensors: Tensors) -> None:
    """Refuse an output that shares memory with another argument: ValueError.

    For real tensors, not fake ones. Memory that interleaves without a shared element is refused,
    too: nobody needs it, and telling the two apart takes more than a look at both ends.
    """
    spans = [None if tensor is None else _span(tensor) for tensor in tensors]
    for place, (arg, span) in enumerate(zip(args, spans, strict=True)):
        if not arg.is_output or span is None:
            continue
        for other, (one, that) in enumerate(zip(args, spans, strict=True)):
            if other == place or that is None or (one.is_output and other > place):
                continue
            if span[0] < that[1] and that[0] < span[1]:
                raise ValueError(
                    f"{arg.label}: shares memory with {one.label}, needs memory of its own"
                )


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """First address and the one past the last; None of an empty tensor."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    steps = zip(tensor.shape, tensor.stride())
    last = sum((extent - 1) * step for extent, step in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def check_no_gradients(name: str, args: Sequence[TensorArg], tensors: Tensors) -> None:
    """Refuse tensors that require grad or carry a tangent: operators have no derivative."""
    if torch.is_grad_enabled():
        for place, tensor in enumerate(tensors):
            if tensor is not None and tensor.requires_grad and args[place].has_gradient:
                raise ValueError(
                    f"{args[place].label}: requires grad, but {name} has no backward pass; "
                    "call it under torch.no_grad() or pass a detached tensor"
                )
    if forward_ad._current_level < 0:
        return
    for arg, tensor in zip(args, tensors):
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                f"{arg.label}: carries a tangent, but {name} has no forward-mode derivative; "
                "pass a detached tensor"
            )


def check_kernel_layout(args: Sequence[TensorArg], values: Values, tensors: Tensors) -> None:
    """Refuse what torch code accepts but kernels cannot load: other dtypes, unaligned rows."""
    for arg, tensor in zip(args, tensors, strict=True):
        if tensor is None or tensor.numel() == 0:
            continue
        needed = getattr(torch, arg.dtype_in(values))
        if tensor.dtype != needed:
            raise TypeError(f"{arg.label}: got {tensor.dtype}, the kernel needs {needed}")
        _check_contiguous_rows(arg, tensor)
        align, size = arg.row_alignment(values), tensor.element_size()
        bounds = arg.stride_alignments(values)
        steps = [
            (n * size, bound)
            for n, extent, bound in zip(tensor.stride(), tensor.shape, bounds)
            if extent > 1
        ]
        if any(n % bound for n, bound in ((tensor.data_ptr(), align), *steps)):
            needs = f"every row must start at a multiple of {align} bytes"
            if set(bounds) - {align}:
                needs = f"strides must be multiples of {bounds} bytes, the address of {align}"
            raise ValueError(
                f"{arg.label}: got strides {quoted(tensor.stride())} at address "
                f"{tensor.data_ptr():#x}, {needs}"
            )


def sizes_of(args: Sequence[TensorArg], tensors: Tensors) -> Mapping[str, int]:
    """The size of every named dimension, of tensors that passed the checks."""
    sizes: dict[str, int] = {}
    for arg, tensor in zip(args, tensors, strict=True):
        if tensor is not None:
            sizes.update(zip(arg.shape, tensor.shape))
    return sizes
