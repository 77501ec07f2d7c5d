"""A kernel that doubles a vector: the smallest thing the kernel compiler can be asked for."""

from __future__ import annotations

import cutlass
from cutlass import cute


class Double:
    """y = 2 x on [n] float32 vectors."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(
            grid=[cute.ceil_div(x.shape[0], 128), 1, 1], block=[128, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        if i < x.shape[0]:
            y[i] = x[i] * 2.0


def build(options: str = ""):
    """Compile `Double` for the architecture of this process."""
    size = cute.sym_int()
    x, y = (
        cute.runtime.make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=4)
        for _ in range(2)
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Double(), x, y, stream, options=f"--enable-tvm-ffi {options}".strip())
