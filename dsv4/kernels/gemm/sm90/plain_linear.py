"""Plain linear for Hopper (sm_90a): y = x W^T in bf16, one arithmetic for any number of tokens.

The bodies are those that `merged_linear` gives its bf16 weights (`streaming`), and so are the bits.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.plain_args import ARGS, values
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.plain_plan import TILINGS
from dsv4.kernels.gemm.sm90.context import Operands
from dsv4.kernels.gemm.sm90.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel


class PlainLinearSm90:
    """Kernels of one configuration, in the order of `plain_plan.TILINGS`."""

    streaming = StreamingLinear

    def __init__(self, config: PlainLinearConfig):
        self.linears = [
            self.streaming(config.in_features, tiling, (Kind.BF16,)) for tiling in TILINGS
        ]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, K] bf16
        weight: cute.Tensor,  # [M, K] bf16
        y: cute.Tensor,  # [T, M] bf16 or fp32, written
        stream,
        *,
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernel."""
        # There are no scales to read.
        factors = Factors((weight,), x, Operands((), x, x, (y,), Boolean(False)))
        for i in cutlass.range_constexpr(len(self.linears)):
            if tiling == i:
                self.linears[i].launch((factors,), stream, num_sms)


def build(config: PlainLinearConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(PlainLinearSm90(config), ARGS, values(config), options)
