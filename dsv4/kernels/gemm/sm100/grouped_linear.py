"""Grouped linear for Blackwell (sm_100a): rows of an FP8 weight in groups, each multiplied with
columns of its own of x, which is not rounded.

A bf16 activation is the sum of two e4m3 codes times a scale (`gemm.quantize`): the tensor core adds
the products of both in one accumulator, with a scale for each. So the weight is read as it is
stored, and bodies, rings and tilings are those of the FP8 linears (`streaming`). By option
activations are rounded, to one code.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.gemm.config import num_code_rows
from dsv4.kernels.gemm.grouped_args import ARGS, values
from dsv4.kernels.gemm.grouped_config import GroupedLinearConfig
from dsv4.kernels.gemm.quantize import QuantizeRows, as_bytes
from dsv4.kernels.gemm.sm100.context import Operands
from dsv4.kernels.gemm.sm100.grouped_plan import plan_of, tilings
from dsv4.kernels.gemm.sm100.streaming import Factors, StreamingLinear
from dsv4.kernels.kit.args import compile_kernel


class GroupedLinearSm100:
    """Kernels of one configuration, in the order of `grouped_plan.tilings`."""

    def __init__(self, config: GroupedLinearConfig):
        self.config = config
        self.linears = [StreamingLinear(plan_of(config, tiling)) for tiling in tilings(config)]
        self.quantizer = QuantizeRows(config.groups * config.in_features, config.terms)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, groups K] bf16
        weight: cute.Tensor,  # [M, K] e4m3
        scale: cute.Tensor,  # [M / 128, K / 128] E8M0 or fp32
        y: cute.Tensor,  # [T, M] bf16, fp32 or e4m3, written
        stream,
        *,
        codes: cute.Tensor,  # [C, groups K] e4m3 scratch of activations that are streamed, or none
        code_scales: cute.Tensor,  # [T, groups K / 128] E8M0, the same
        out_scale: cute.Tensor,  # [T, M / 128] E8M0, written where y are codes, else [0, M / 128]
        x_scale: cute.Tensor,  # [T, groups K / 128] E8M0 where x are codes [C, groups K]
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernel, after the quantisation where it streams activations."""
        if cutlass.const_expr(not self.config.quantizes):
            codes, code_scales = x, x_scale
        tokens = x.shape[0]
        # Without scratch, token tiles of the tiling that quantises follow each other.
        has_codes = codes.shape[0] >= num_code_rows(tokens, self.config.terms)
        has_scratch = has_codes & (code_scales.shape[0] >= tokens)
        y_scale = ()
        if cutlass.const_expr(self.config.rounds_output):
            y_scale = (as_bytes(out_scale),)
        operands = Operands((as_bytes(scale),), x, as_bytes(code_scales), (y,), y_scale=y_scale)
        factors = (Factors((weight,), codes, operands),)
        if cutlass.const_expr(not self.config.quantizes):
            self._launch_streamed(factors, stream, tiling, num_sms)
        elif (tiling == 0) | (has_scratch ^ True):
            self.linears[0].launch(factors, stream, num_sms)
        else:
            self.quantizer.launch(x, codes, code_scales, stream, num_sms)
            self._launch_streamed(factors, stream, tiling, num_sms)

    @cute.jit
    def _launch_streamed(self, factors: tuple, stream, tiling: Int32, num_sms: Int32):
        """Launch a tiling's kernel."""
        for i in cutlass.range_constexpr(len(self.linears)):
            if cutlass.const_expr(self.linears[i].plan.tiling.is_streamed):  # noqa: SIM102 static
                if tiling == i:
                    self.linears[i].launch(factors, stream, num_sms)


def build(config: GroupedLinearConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(GroupedLinearSm100(config), ARGS, values(config), options)
