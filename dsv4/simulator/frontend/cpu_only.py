"""A CPU in place of the GPU that a script asks torch for."""

from __future__ import annotations

import contextlib
import types

import torch

from dsv4.simulator.frontend.cuda_tensors import CudaTensors


class CpuOnly:
    """Process-wide stand-in that runs code for CUDA tensors, streams and devices on a CPU."""

    def __init__(self, arch: str):
        self.capability = (9, 0) if arch.startswith("sm_90") else (10, 0)
        self.multiprocessors = 132 if arch.startswith("sm_90") else 148

    def install(self) -> None:
        """Replace torch's CUDA entry points; nothing undoes this."""
        mode = CudaTensors()
        mode.__enter__()
        _register_for_cpu(mode)
        torch.version.cuda = "13.0"
        for name, value in self._answers().items():
            setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
        torch.cuda.Event, torch.cuda.Stream = _Event, _Stream
        for name in ("stream", "device", "device_of"):
            setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
        torch.Generator = _Generator
        table = types.SimpleNamespace(table=lambda **_: "nothing was profiled")
        profile = types.SimpleNamespace(key_averages=lambda: table)
        torch.profiler.profile = lambda **_: contextlib.nullcontext(profile)

    def _answers(self) -> dict[str, object]:
        """What functions of torch.cuda return."""
        properties = types.SimpleNamespace(
            multi_processor_count=self.multiprocessors, major=self.capability[0],
            minor=self.capability[1], name="simulated", total_memory=1 << 37,
            L2_cache_size=1 << 26, shared_memory_per_block_optin=232448,
            shared_memory_per_block=49152, shared_memory_per_multiprocessor=233472,
            max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, warp_size=32,
        )  # fmt: skip
        return {
            "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
            "set_device": None, "get_device_capability": self.capability,
            "get_device_properties": properties, "get_device_name": "simulated",
            "synchronize": None, "current_stream": _Stream(), "default_stream": _Stream(),
            "set_stream": None, "init": None, "empty_cache": None, "memory_allocated": 0,
            "max_memory_allocated": 0, "reset_peak_memory_stats": None,
            "mem_get_info": (1 << 37, 1 << 37), "is_current_stream_capturing": False,
        }  # fmt: skip


class _Waits:
    """Event that has always happened: its methods do nothing."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self, *_) -> None:
        pass

    record = wait = wait_stream = wait_event = record_event = synchronize


class _Event(_Waits):
    """An event of a stream; the time between two means nothing."""

    cuda_event = 0

    def elapsed_time(self, other: _Event) -> float:
        return 1.0


class _Stream(_Waits):
    """The only stream."""

    cuda_stream = device_index = 0
    device = torch.device("cuda", 0)


class _Generator(torch.Generator):
    """A generator of random numbers on the CPU, whatever device is asked for."""

    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")


def _register_for_cpu(mode: CudaTensors) -> None:
    """Let Python kernels of custom operators, for CUDA too, run for CPU tensors under `mode`."""
    library = torch.library.Library
    register = library.impl

    def impl(self, op_name, fn, dispatch_key="", **keywords):
        key = dispatch_key
        if key == "CUDA":
            name = op_name if isinstance(op_name, str) else op_name.name()
            qualified = name if "::" in name else f"{self.ns}::{name}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU"):
                return None
            key = "CPU"
        if key not in ("Meta", "Autograd", "ADInplaceOrView"):
            fn = mode.around(fn)
        return register(self, op_name, fn, key, **keywords)

    library.impl = impl
