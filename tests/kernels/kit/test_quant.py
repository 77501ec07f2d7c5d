"""FP8 quantisation in registers against torch's: every bf16 value as the amax of a group of two."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops.quantize import quantize_e4m3
from dsv4.testing.harness import compiler_options
from dsv4.testing.rms_norm_fp8 import assert_same_codes

cutlass = pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from cutlass import Int32, Uint32, cute  # noqa: E402

from dsv4.kernels.kit import quant  # noqa: E402

pytestmark = pytest.mark.stage("rows")

THREADS = 256


class Pairs:
    """One group of a bf16 pair per thread, its codes twice."""

    @cute.jit
    def __call__(self, pairs: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor, stream):
        grid = [cute.ceil_div(pairs.shape[0], THREADS), 1, 1]
        self.kernel(pairs, codes, scales).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, pairs: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor):
        place = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        pair = Uint32(pairs[place])
        scale = quant.e8m0_scale_e4m3(quant.amax_bf16([pair], 1))
        words = cute.recast_tensor(quant.quantize_e4m3([pair, pair], scale), Uint32)
        codes[place] = Int32(words[0])
        scales[place] = scale


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_bf16_value(arch, seed) -> None:
    from dsv4.simulator import simulate

    fake = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi {compiler_options(arch)}"
    compiled = cute.compile(Pairs(), fake, fake, fake, stream, options=options)

    every = torch.arange(1 << 16).to(torch.int16)
    smaller = (torch.rand(1 << 16) * every.view(torch.bfloat16)).bfloat16()
    pairs = torch.stack((every, smaller.view(torch.int16)), 1).contiguous()
    codes, scales = (torch.full((1 << 16,), -1, dtype=torch.int32) for _ in range(2))
    simulate(compiled, pairs.view(torch.int32)[:, 0].contiguous(), codes, scales)

    wanted_codes, wanted_scales = quantize_e4m3(pairs.view(torch.bfloat16), 2)
    found = codes.view(torch.float8_e4m3fn).view(-1, 2, 2)
    for copy in range(2):
        assert_same_codes("codes", found[:, copy].contiguous(), wanted_codes)
    assert torch.equal(scales, wanted_scales.view(torch.uint8).int()[:, 0])
