"""Compiling the test kernels and running bare PTX."""

from __future__ import annotations

import functools
import tempfile

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack, make_fake_stream

OPTIONS = "--keep-ptx --generate-line-info --enable-tvm-ffi"


@functools.cache
def dump_folder() -> str:
    """Where the compiler drops its PTX files."""
    return tempfile.mkdtemp(prefix="dsv4-simulator-tests-")


def compile_kernel(kernel, arch: str, *tensors: torch.Tensor):
    """Compile `kernel(*tensors, stream)` for `arch` ("sm_100a", "sm_90a") from example tensors."""
    from dsv4.simulator import CudaView

    arguments = [from_dlpack(CudaView(t), assumed_align=16) for t in tensors]
    return cute.compile(
        kernel,
        *arguments,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"{OPTIONS} --gpu-arch {arch} --dump-dir {dump_folder()}",
    )


def run_ptx(
    text: str,
    params: list[bytes | int],
    *tensors: torch.Tensor,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared: int = 0,
    schedule: str = "eager",
    seed: int = 0,
):
    """Run the only entry of a PTX module on `grid` CTAs; `tensors` may be accessed.

    Integer parameters are 64-bit. Returns the Launch.
    """
    from dsv4.simulator.memory import GlobalMemory
    from dsv4.simulator.program import Program
    from dsv4.simulator.ptx.parser import parse_module
    from dsv4.simulator.scheduler import Launch, LaunchConfig, run_launch

    ((name, entry),) = parse_module(text).entries.items()
    memory = GlobalMemory()
    for i, t in enumerate(tensors):
        memory.add(t.data_ptr(), t.numel() * t.element_size(), f"tensor {i}", t)
    raw = [p.to_bytes(8, "little") if isinstance(p, int) else p for p in params]
    config = LaunchConfig(name, (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, raw)
    launch = Launch(config, Program(entry, {}), memory, schedule, seed, 148)
    run_launch(launch)
    return launch


def ptx_kernel(body: str, params: int = 1, registers: str = "", target: str = "sm_90a") -> str:
    """A PTX module around `body`. Parameters P0.. are 64-bit, loaded into %a0..; `smem` is dynamic.

    Registers: %p<16>, %h<16> (b16), %r<64> (b32), %d<32> (b64), %f<32> (f32).
    """
    names = [f"P{i}" for i in range(params)]
    declared = ", ".join(f".param .align 64 .b8 {n}[128]" if n in registers else f".param .b64 {n}"
                         for n in names)  # fmt: skip
    loads = "\n".join(f"ld.param.b64 %a{i}, [{n}];" for i, n in enumerate(names))
    return f"""
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({declared})
{{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<32>;
.reg .b64 %a<8>;
{loads}
{body}
ret;
}}
"""
