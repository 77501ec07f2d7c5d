"""Arg-max of a plain linear for Hopper (sm_90a): each token's row of the largest y = x W^T, in the
launch of the product, whose bits are those of `plain_linear`."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from dsv4.kernels.gemm.argmax_args import ARGS
from dsv4.kernels.gemm.best_keys import BestOperands
from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.epilogues import ArgMax
from dsv4.kernels.gemm.plain_args import values
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.plain_plan import TILINGS
from dsv4.kernels.gemm.sm90.context import Operands
from dsv4.kernels.gemm.sm90.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel


class LinearArgMaxSm90:
    """Kernels of one configuration, in the order of `plain_plan.TILINGS`."""

    streaming = StreamingLinear

    def __init__(self, config: PlainLinearConfig):
        self.linears = [
            self.streaming(config.in_features, tiling, (Kind.BF16,), epilogues=(ArgMax(),))
            for tiling in TILINGS
        ]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, K] bf16
        weight: cute.Tensor,  # [M, K] bf16
        rows: cute.Tensor,  # [T] int64, written
        stream,
        *,
        out: cute.Tensor,  # [T, M] bf16 or fp32, written, or [0, M]
        workspace: cute.Tensor,  # fp32, zeros before and after
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernel."""
        best = (BestOperands(rows, workspace),)
        operands = Operands((), x, x, (out,), Boolean(False), best=best)
        for i in cutlass.range_constexpr(len(self.linears)):
            if tiling == i:
                self.linears[i].launch((Factors((weight,), x, operands),), stream, num_sms)


def build(config: PlainLinearConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(LinearArgMaxSm90(config), ARGS, values(config), options)
