"""A CPU in place of the GPU that a script asks torch for."""

from __future__ import annotations

import contextlib
import types

ALIGNMENT = 256  # of what CUDA allocates


class CpuOnly:
    """Lets code that asks for CUDA tensors, streams and devices run on a CPU, process-wide."""

    def __init__(self, arch: str):
        self.capability = (9, 0) if arch.startswith("sm_90") else (10, 0)
        self.multiprocessors = 132 if arch.startswith("sm_90") else 148

    def install(self) -> None:
        """Replace torch's CUDA entry points; nothing undoes this."""
        import torch

        mode = _device_mode()
        mode.__enter__()
        properties = types.SimpleNamespace(
            multi_processor_count=self.multiprocessors, major=self.capability[0],
            minor=self.capability[1], name="simulated", total_memory=1 << 37,
            L2_cache_size=1 << 26, shared_memory_per_block_optin=232448, warp_size=32,
        )  # fmt: skip
        stream = types.SimpleNamespace(
            cuda_stream=0, synchronize=lambda: None, wait_stream=lambda other: None
        )
        for name, value in {
            "is_available": True, "device_count": 1, "current_device": 0, "set_device": None,
            "get_device_capability": self.capability, "get_device_properties": properties,
            "get_device_name": "simulated", "synchronize": None, "current_stream": stream,
            "default_stream": stream, "init": None, "empty_cache": None,
        }.items():  # fmt: skip
            setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
        event = types.SimpleNamespace(
            record=lambda *_: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0
        )
        torch.cuda.Event, torch.cuda.Stream = (lambda **_: event), (lambda **_: stream)
        torch.cuda.stream = lambda _: contextlib.nullcontext()
        table = types.SimpleNamespace(table=lambda **_: "nothing was profiled")
        profile = types.SimpleNamespace(key_averages=lambda: table)
        torch.profiler.profile = lambda **_: contextlib.nullcontext(profile)


def _device_mode():
    """A torch function mode that turns every CUDA device into the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(value) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, kinds, arguments=(), keywords=None):
            keywords = keywords or {}
            if function is torch.Tensor.cuda:
                return _as_allocated(arguments[0])
            if function is torch._scaled_mm:
                return _scaled_mm(*arguments, **keywords)
            moved = any(map(is_cuda, (*arguments, *keywords.values())))
            result = function(
                *("cpu" if is_cuda(v) else v for v in arguments),
                **{k: "cpu" if is_cuda(v) else v for k, v in keywords.items()},
            )
            return _as_allocated(result) if moved and isinstance(result, torch.Tensor) else result

    return Mode()


def _as_allocated(tensor):
    """A copy with the same strides, as aligned as CUDA allocations are (kernels rely on it)."""
    import torch

    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()) if n)
    size = max(extent, 1) * tensor.element_size()
    room = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    place = room[start : start + size].view(tensor.dtype)
    return torch.as_strided(place, tensor.shape, tensor.stride()).copy_(tensor)


def _scaled_mm(a, b, a_scales, b_scales, bias=None, out_dtype=None):
    """torch._scaled_mm of block-scaled operands, which exists for CUDA only: A [M, K] times B
    [K, N], 16 elements to an e4m3 scale or 32 to an e8m0 one."""
    import torch

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
