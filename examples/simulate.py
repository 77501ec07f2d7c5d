"""A CuTeDSL kernel with a missing barrier, run on the CPU: the simulator names both lines.

python examples/simulate.py
"""

import tempfile

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from dsv4.simulator import simulate

THREADS = 128


@cute.kernel
def reverse_kernel(source: cute.Tensor, target: cute.Tensor, waits: cutlass.Constexpr):
    """target[i] = source[127 - i], through shared memory."""
    thread = cute.arch.thread_idx()[0]
    shared = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(THREADS))
    shared[thread] = source[thread]
    if cutlass.const_expr(waits):
        cute.arch.sync_threads()
    target[thread] = shared[THREADS - 1 - thread]


@cute.jit
def reverse(source: cute.Tensor, target: cute.Tensor, stream, waits: cutlass.Constexpr):
    reverse_kernel(source, target, waits).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def compiled(waits: bool):
    row = make_fake_tensor(cutlass.Float32, (THREADS,), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    folder = tempfile.mkdtemp()
    options = (
        f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --generate-line-info --dump-dir {folder}"
    )
    return cute.compile(reverse, row, row, stream, waits, options=f"--enable-tvm-ffi {options}")


def main() -> None:
    source = torch.randn(THREADS)
    for waits in (True, False):
        target = torch.empty(THREADS)
        report = simulate(compiled(waits), source, target)
        right = torch.equal(target, source.flip(0))
        print(f"with sync_threads: {waits}; right: {right}; races: {len(report.races)}")
        for finding in report.races[:1]:
            print(finding)
        assert (len(report.races) == 0) == waits


if __name__ == "__main__":
    main()
