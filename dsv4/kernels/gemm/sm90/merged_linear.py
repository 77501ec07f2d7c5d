"""Merged linear for Hopper (sm_90a): products of one input with several weights, FP8 and bf16
ones, in one launch.

`MergedLinearSm90` is what callers construct, compile and call. It has one kernel for each of its
tilings (`streaming`), and one that quantises activations for those that stream them.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, cute

from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.merged_args import ARGS, values
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.merged_linear import MergedLinear
from dsv4.kernels.gemm.merged_plan import tilings
from dsv4.kernels.gemm.sm90.context import Operands
from dsv4.kernels.gemm.sm90.epilogue import uncoded
from dsv4.kernels.gemm.sm90.fp8_linear import as_bytes, is_aligned
from dsv4.kernels.gemm.sm90.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel


class MergedLinearSm90(MergedLinear):
    """Kernels of one configuration, in the order of `merged_plan.tilings`."""

    streaming = StreamingLinear

    def __init__(self, config: MergedLinearConfig):
        linears = [
            self.streaming(
                config.in_features,
                tiling,
                config.kinds,
                epilogues=config.head_epilogues,
            )
            for tiling in tilings(config)
        ]
        super().__init__(config, linears)

    @cute.jit
    def _launch(self, i: cutlass.Constexpr, codes, code_scales, x, products, stream, num_sms):
        never, stores_by_tma = Boolean(False), Boolean(True)
        factors = {}
        weights, scales, ys = zip(*products.fp8)
        for y in uncoded(ys):
            stores_by_tma = stores_by_tma & is_aligned(y)
        x_scale = as_bytes(code_scales)
        scales = tuple(as_bytes(scale) for scale in scales)
        operands = Operands(scales, x, x_scale, ys, stores_by_tma, products.heads)
        factors[Kind.FP8] = Factors(weights, codes, operands)
        if cutlass.const_expr(self.config.plain):
            weights, ys = zip(*products.plain)
            factors[Kind.BF16] = Factors(weights, x, Operands((), x, x_scale, ys, never))
        self.linears[i].launch(tuple(factors[kind] for kind in self.config.kinds), stream, num_sms)


def build(config: MergedLinearConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(MergedLinearSm90(config), ARGS, values(config), options)
