"""Merged linear for Blackwell (sm_100a): products of one input with several weights, FP8 and bf16
ones, in one launch.

`MergedLinearSm100` is what callers construct, compile and call. It has one kernel for each of its
tilings (`streaming`), and one that quantises activations for those that stream them.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.merged_args import ARGS, values
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.merged_linear import MergedLinear
from dsv4.kernels.gemm.quantize import as_bytes
from dsv4.kernels.gemm.sm100.context import Operands
from dsv4.kernels.gemm.sm100.merged_plan import plans, tilings
from dsv4.kernels.gemm.sm100.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel


class MergedLinearSm100(MergedLinear):
    """Kernels of one configuration, in the order of `merged_plan.tilings`."""

    def __init__(self, config: MergedLinearConfig):
        linears = [StreamingLinear(*plans(config, tiling)) for tiling in tilings(config)]
        super().__init__(config, linears)

    @cute.jit
    def _launch(self, i: cutlass.Constexpr, codes, code_scales, x, products, stream, num_sms):
        factors, x_scale = {}, as_bytes(code_scales)
        weights, scales, ys = zip(*products.fp8)
        scales = tuple(as_bytes(scale) for scale in scales)
        operands = Operands(scales, x, x_scale, ys, products.heads)
        factors[Kind.FP8] = Factors(weights, codes, operands)
        if cutlass.const_expr(self.config.plain):
            weights, ys = zip(*products.plain)
            factors[Kind.BF16] = Factors(weights, x, Operands((), x, x_scale, ys))
        self.linears[i].launch(tuple(factors[kind] for kind in self.config.kinds), stream, num_sms)


def build(config: MergedLinearConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(MergedLinearSm100(config), ARGS, values(config), options)
