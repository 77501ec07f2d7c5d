"""CPU tensors whose device attribute is a GPU's, for code that checks it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

ALIGNMENT = 256  # of what CUDA allocates
_DEVICE = torch.device("cuda", 0)
_HOST = "_simulated_on_host"  # attribute of tensors that would be on the CPU
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_IS_CUDA, _IS_CPU = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__
_DEVICE_OF = torch.Tensor.device.__get__


class CudaTensors(TorchFunctionMode):
    """Torch mode in which every CUDA device is the CPU, and tensors answer as on a GPU.

    A tensor counts as on the GPU unless code that this mode saw made it on the CPU.
    """

    def __torch_function__(self, function, kinds, arguments=(), keywords=None):
        keywords = keywords or {}
        if function in _ANSWERS:
            return _ANSWERS[function](arguments[0])
        if function is torch.Tensor.cuda:
            return _as_allocated(arguments[0])
        if function is torch.Tensor.pin_memory:
            return arguments[0]
        if function is torch._scaled_mm:
            return _scaled_mm(*arguments, **keywords)
        given = [*arguments, *keywords.values()]
        moved = any(map(_is_cuda_device, given))
        keywords.pop("pin_memory", None)
        if function in _BACKWARD:
            # What the graph's functions do is seen, too.
            engine = torch.autograd._engine_run_backward
            with mock.patch.object(torch.autograd, "_engine_run_backward", self.around(engine)):
                return function(*arguments, **keywords)
        result = function(
            *("cpu" if _is_cuda_device(v) else v for v in arguments),
            **{k: "cpu" if _is_cuda_device(v) else v for k, v in keywords.items()},
        )
        if moved and isinstance(result, torch.Tensor):
            if not _real(result):
                return result
            if any(True for _ in _tensors(given)):
                return _as_allocated(result)
            return _as_allocated(result.detach()).requires_grad_(result.requires_grad)  # a leaf
        if function is torch.Tensor.cpu or any(map(_is_host_device, given)):
            if isinstance(result, torch.Tensor) and result is arguments[0] and _on_gpu(result):
                result = result.clone()  # from a GPU it is a copy
        elif not all(map(_on_host, _tensors(given))):
            return _as_allocated(result) if _is_misaligned(result, given) else result
        for tensor in _tensors([result]):
            setattr(tensor, _HOST, True)
        return result

    def around(self, function: Callable) -> Callable:
        """A function whose body runs under this mode wherever it is called from."""

        @functools.wraps(function)
        def run(*arguments, **keywords):
            with self:
                return function(*arguments, **keywords)

        return run


def _real(tensor: torch.Tensor) -> bool:
    """True for tensors with memory, not meta and fake ones."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _HOST, False)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return _real(tensor) and not _on_host(tensor)


_ANSWERS = {
    _IS_CUDA: _on_gpu,
    _IS_CPU: lambda tensor: tensor.is_cpu and not _on_gpu(tensor),
    _DEVICE_OF: lambda tensor: _DEVICE if _on_gpu(tensor) else tensor.device,
    torch.Tensor.get_device: lambda tensor: 0 if _on_gpu(tensor) else tensor.get_device(),
}


def _is_misaligned(result, given: Iterable) -> bool:
    """True for a new tensor that no GPU would have allocated there."""
    if not isinstance(result, torch.Tensor) or not _on_gpu(result) or result.requires_grad:
        return False
    if not result.numel() or result.storage_offset() or result.data_ptr() % ALIGNMENT == 0:
        return False
    storage = result.untyped_storage().data_ptr()
    return all(
        tensor.untyped_storage().data_ptr() != storage
        for tensor in _tensors(given)
        if _real(tensor)
    )


def _tensors(values: Iterable) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_cuda_device(value) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


def _is_host_device(value) -> bool:
    return isinstance(value, (str, torch.device)) and str(value) == "cpu"


def _as_allocated(tensor):
    """A copy with the same strides, as aligned as CUDA allocations are (kernels rely on it), in a
    storage that ends where it does: an access behind it is out of bounds."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()) if n)
    size = max(extent, 1) * tensor.element_size()
    room = bytearray(size + ALIGNMENT)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % ALIGNMENT
    place = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=start).view(tensor.dtype)
    return torch.as_strided(place, tensor.shape, tensor.stride()).copy_(tensor)


def _scaled_mm(a, b, a_scales, b_scales, bias=None, out_dtype=None):
    """torch._scaled_mm of block-scaled operands, which exists for CUDA only: A [M, K] times B
    [K, N], 16 elements to an e4m3 scale or 32 to an e8m0 one."""
    block = 16 if a_scales.dtype == torch.float8_e4m3fn else 32

    def values(tensor):  # [rows, K]
        if tensor.dtype != torch.float4_e2m1fn_x2:
            return tensor.float()
        codes = tensor.view(torch.uint8)
        pairs = torch.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1).long()
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return torch.where(pairs < 8, 1.0, -1.0) * table[pairs & 7]

    def scaled(tensor, scales):
        # Scales lie in blocks of 128 rows and 4 columns: [32, 4 groups of 32 rows, 4 columns].
        rows = values(tensor)
        high, wide = -(-len(rows) // 128), -(-rows.shape[1] // (4 * block))
        grid = scales.float().reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
        factors = grid.reshape(128 * high, 4 * wide).repeat_interleave(block, 1)
        return rows * factors[: len(rows), : rows.shape[1]]

    return (scaled(a, a_scales) @ scaled(b.transpose(0, 1), b_scales).T).to(out_dtype)
