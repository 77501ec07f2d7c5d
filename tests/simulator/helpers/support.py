"""Compiling the test kernels."""

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
