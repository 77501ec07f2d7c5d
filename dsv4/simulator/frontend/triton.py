"""Triton kernels: compiled as for a GPU, their launches simulated."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from dsv4.simulator.frontend.ptx_text import Parameter, simulate_ptx
from dsv4.simulator.frontend.tensor_maps import encode_tiled
from dsv4.simulator.ptx.parser import parse_module
from dsv4.simulator.report import Report

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

Simulate = Callable[[Callable[..., Report]], None]


class SimulatedDriver:
    """Stand-in for Triton's driver, with the answers of a GPU that is simulated."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int):
        from triton.backends.compiler import GPUTarget

        self.capability = capability
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        self.properties = {
            "max_shared_mem": 232448, "multiprocessor_count": multiprocessors, "warpSize": 32,
            "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self.properties

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self.capability

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self) -> Callable:
        """Measures nothing: the first of several configurations is the best."""
        return lambda call, *, quantiles=None, **_: [1.0] * len(quantiles or [0.5])

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.zeros(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass

    def fill_tma_descriptor_tiled(
        self, address, swizzle, size, dtype, block, shape, strides, padding
    ) -> bytes:
        """A tensor map; Triton gives dimensions outermost first and strides in elements."""
        inner_first = [size * stride for stride in reversed(strides[:-1])]
        return encode_tiled(
            dtype, address, shape[::-1], inner_first, block[::-1], swizzle=swizzle, fill=padding
        )


def install(simulate: Simulate, capability: tuple[int, int], multiprocessors: int) -> None:
    """Send every launch of this process to `simulate`, as a function that takes `schedule`,
    `races` and `buffers`."""
    from triton import testing
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    driver.set_active(SimulatedDriver(capability, multiprocessors))
    testing.do_bench = _run_once

    def init_handles(kernel) -> None:
        if kernel.module is None:
            kernel.module = kernel.function = kernel
            kernel.n_regs = kernel.n_spills = 0
            kernel.n_max_threads = 1024
            kernel._run = _Launch(kernel, simulate)

    CompiledKernel._init_handles = init_handles
    CompiledKernel.__del__ = lambda kernel: None


def _run_once(function: Callable[[], Any], *_, **__) -> float:
    """A benchmark: milliseconds of no meaning."""
    function()
    return 1.0


class _Launch:
    """Launches of one compiled kernel."""

    def __init__(self, kernel: CompiledKernel, simulate: Simulate):
        from triton.backends.driver import expand_signature
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        self.ptx, self.metadata, self.simulate = kernel.asm["ptx"], kernel.metadata, simulate
        self.entry = parse_module(self.ptx).entry(kernel.metadata.name)
        described = getattr(kernel.metadata, "tensordesc_meta", None)
        signature = dict(kernel.src.signature)
        self.types = expand_signature(signature.values(), described, "nvTmaDesc")
        self.expanded = wrap_handle_tensordesc(lambda values: values, signature, described)

    def __call__(self, x: int, y: int, z: int, *rest) -> None:
        """Arguments as of Triton's own launchers: stream, function, metadata, hooks, then those of
        the kernel."""
        values = [
            _parameter(kind, value) for kind, value in _flat(self.types, self.expanded(rest[6:]))
        ]
        meta, ctas = self.metadata, getattr(self.metadata, "num_ctas", 1)
        # Two hidden parameters at the end: scratch memory, and that of a profiler.
        scratch = torch.zeros(
            max(x * y * z * ctas * meta.global_scratch_size, 1), dtype=torch.uint8
        )
        values += [scratch, 0][: len(self.entry.params) - len(values)]
        block = self.entry.threads or (32 * meta.num_warps, 1, 1)

        self.simulate(
            functools.partial(
                simulate_ptx, self.ptx, meta.name, grid=(x * ctas, y, z), block=block,
                cluster=(ctas, 1, 1), non_portable=ctas > 8, shared=meta.shared,
                params=tuple(values),
            )
        )  # fmt: skip


def _flat(types: tuple, values: tuple) -> Iterator[tuple[str, Any]]:
    """Types and values of what a kernel is given at run time, without nesting."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def _parameter(kind: str, value: Any) -> Parameter:
    """A value as simulate_ptx takes it."""
    if kind == "nvTmaDesc":
        return value
    if kind.startswith("*"):
        if value is None or isinstance(value, (int, torch.Tensor)):
            return 0 if value is None else value
        return value.data_ptr()
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    return float(value) if kind in ("fp16", "fp32", "f32", "fp64") else int(value)
