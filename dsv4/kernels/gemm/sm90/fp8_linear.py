"""FP8 linear for Hopper (sm_90a): y = x W^T with block scales, one arithmetic for any number of
tokens.

`Fp8LinearSm90` is what callers construct, compile and call. It has one kernel for each of its
tilings (`streaming`), and one that quantises bf16 activations for those that stream them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from dsv4.kernels.gemm.args import ARGS, values
from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.operands import head_operands
from dsv4.kernels.gemm.plan import tilings
from dsv4.kernels.gemm.quantize import QuantizeRows, as_bytes
from dsv4.kernels.gemm.sm90.context import Operands
from dsv4.kernels.gemm.sm90.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.swizzle import VECTOR_BYTES


class Outputs(NamedTuple):
    """Output of a launch, and tensors of its epilogue."""

    y: cute.Tensor
    heads: tuple

    def operands(self, scale: cute.Tensor, x: cute.Tensor, x_scale: cute.Tensor) -> Operands:
        return Operands((scale,), x, x_scale, (self.y,), is_aligned(self.y), self.heads)


class Fp8LinearSm90:
    """Kernels of one configuration, in the order of `plan.tilings`."""

    streaming = StreamingLinear

    def __init__(self, config: Fp8LinearConfig):
        self.config = config
        epilogues = (config.head_epilogue,) if config.head_epilogue else ()
        self.linears = [
            self.streaming(config.in_features, tiling, epilogues=epilogues)
            for tiling in tilings(config)
        ]
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
        tokens = x.shape[0]
        heads = head_operands(
            (self.config.head_epilogue,), rope, positions, (squares,), (head_scales,)
        )
        outputs = Outputs(y, heads)
        if cutlass.const_expr(self.config.quantizes):
            # Without scratch, token tiles of the resident tiling follow each other.
            has_scratch = cutlass.min(codes.shape[0], code_scales.shape[0]) >= tokens
            if tiling == 0 or not has_scratch:
                operands = outputs.operands(as_bytes(scale), x, as_bytes(x_scale))
                factors = Factors((weight,), x, operands)
                self.linears[0].launch((factors,), stream, num_sms)
            else:
                self.quantizer.launch(x, codes, code_scales, stream, num_sms)
                inputs = codes, as_bytes(code_scales)
                self._launch_streamed(weight, scale, x, inputs, outputs, stream, tiling, num_sms)
        else:
            inputs = x, as_bytes(x_scale)
            self._launch_streamed(weight, scale, x, inputs, outputs, stream, tiling, num_sms)

    @cute.jit
    def _launch_streamed(self, weight, scale, x, inputs, outputs, stream, tiling, num_sms):
        codes, code_scales = inputs
        operands = outputs.operands(as_bytes(scale), x, code_scales)
        for i in cutlass.range_constexpr(len(self.linears)):
            if cutlass.const_expr(self.linears[i].plan.tiling.is_streamed):  # noqa: SIM102 static
                if tiling == i:
                    factors = Factors((weight,), codes, operands)
                    self.linears[i].launch((factors,), stream, num_sms)


@cute.jit
def is_aligned(y: cute.Tensor):
    """Whether TMA can write y."""
    size = y.element_type.width // 8
    misplaced = (y.iterator.toint() | Int64(y.stride[0]) * size) % VECTOR_BYTES
    return misplaced == 0


def build(config: Fp8LinearConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(Fp8LinearSm90(config), ARGS, values(config), options)
