"""FP8 linear for Blackwell (sm_100a): y = x W^T with block scales, one arithmetic for any number of
tokens.

`Fp8LinearSm100` is what callers construct, compile and call. It has one kernel for each of its
tilings (`streaming`), and one that quantises bf16 activations for those that stream codes.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.args import ARGS, values
from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.operands import head_operands
from dsv4.kernels.gemm.quantize import QuantizeRows, as_bytes
from dsv4.kernels.gemm.sm100.context import Operands
from dsv4.kernels.gemm.sm100.plan import plan_of, tilings
from dsv4.kernels.gemm.sm100.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel


class Fp8LinearSm100:
    """Kernels of one configuration, in the order of `plan.tilings`."""

    def __init__(self, config: Fp8LinearConfig):
        self.config = config
        self.linears = [StreamingLinear(plan_of(config, tiling)) for tiling in tilings(config)]
        self.quantizer = QuantizeRows(config.in_features)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, K] bf16 or e4m3
        weight: cute.Tensor,  # [M, K] e4m3
        scale: cute.Tensor,  # [ceil(M / 128), K / 128] E8M0 or fp32
        x_scale: cute.Tensor,  # [T, K / 128] E8M0, or [0, K / 128] beside bf16
        y: cute.Tensor,  # [T, M] bf16, fp32 or e4m3, written
        stream,
        *,
        codes: cute.Tensor,  # [T, K] e4m3 scratch of bf16 activations that are streamed, or [0, K]
        code_scales: cute.Tensor,  # [T, K / 128] E8M0, the same
        rope: cute.Tensor,  # [R, 64] fp32 of the epilogue, or [0, 64]
        positions: cute.Tensor,  # [T] int32, or [0]
        squares: cute.Tensor,  # [T, H, N] fp32, written, or [0, H, N]
        head_scales: cute.Tensor,  # [T, H] fp32, written where y are codes, or [0, H]
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernel, after the quantisation where it streams bf16 activations."""
        heads = head_operands(
            (self.config.head_epilogue,), rope, positions, (squares,), (head_scales,)
        )
        operands = Operands((as_bytes(scale),), x, as_bytes(x_scale), (y,), heads)
        if cutlass.const_expr(self.config.quantizes):
            # Without scratch, token tiles of the tiling that quantises follow each other.
            has_scratch = cutlass.min(codes.shape[0], code_scales.shape[0]) >= x.shape[0]
            if tiling == 0 or not has_scratch:
                self.linears[0].launch((Factors((weight,), codes, operands),), stream, num_sms)
            else:
                self.quantizer.launch(x, codes, code_scales, stream, num_sms)
                operands = Operands((as_bytes(scale),), x, as_bytes(code_scales), (y,), heads)
                factors = Factors((weight,), codes, operands)
                self._launch_streamed(factors, stream, tiling, num_sms)
        else:
            self._launch_streamed(Factors((weight,), x, operands), stream, tiling, num_sms)

    @cute.jit
    def _launch_streamed(self, factors: Factors, stream, tiling, num_sms):
        for i in cutlass.range_constexpr(len(self.linears)):
            if cutlass.const_expr(self.linears[i].plan.tiling.is_streamed):  # noqa: SIM102 static
                if tiling == i:
                    self.linears[i].launch((factors,), stream, num_sms)


def build(config: Fp8LinearConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(Fp8LinearSm100(config), ARGS, values(config), options)
