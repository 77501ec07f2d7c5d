"""Division by the length of a row, as the kernel does it, against a correctly rounded one."""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.harness import compiler_options

cutlass = pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from cutlass import Float32, cute  # noqa: E402

from dsv4.kernels.kit.rms import exact_quotient  # noqa: E402

pytestmark = pytest.mark.stage("rows")

THREADS = 256
# Powers of two and others; the largest reciprocals' errors are among them.
DIVISORS = (128, 384, 640, 1536, 4096, 7168, 7296, 11392, 16256, 16384)


class Quotients:
    """out[i, j] = x[i] / DIVISORS[j]."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        grid = [cute.ceil_div(x.shape[0], THREADS), 1, 1]
        self.kernel(x, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        place = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        for j in cutlass.range_constexpr(len(DIVISORS)):
            out[place, j] = exact_quotient(x[place], DIVISORS[j])


def test_quotients_are_rounded_correctly(seed) -> None:
    from dsv4.simulator import simulate

    fake = cute.runtime.make_fake_tensor
    rows = cute.sym_int()
    compiled = cute.compile(
        Quotients(),
        fake(Float32, (rows,), (1,), assumed_align=4),
        fake(Float32, (rows, len(DIVISORS)), (len(DIVISORS), 1), assumed_align=4),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {compiler_options('sm_90a')}",
    )
    x = torch.rand(1 << 15) * torch.exp2(torch.randint(-80, 120, (1 << 15,)).float())
    x[:4] = torch.tensor([0.0, torch.inf, torch.nan, torch.finfo(torch.float32).max])
    out = torch.full((len(x), len(DIVISORS)), -1.0)
    simulate(compiled, x, out)
    # fp64 is rounded twice, but a quotient of 24 bits by 14 lies far from the middle of two floats.
    expected = (x[:, None].double() / torch.tensor(DIVISORS)).float()
    assert torch.equal(out.nan_to_num(nan=-2.0), expected.nan_to_num(nan=-2.0))
