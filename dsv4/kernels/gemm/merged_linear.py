"""Merged linear: the call of its kernels, of any architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.operands import head_operands
from dsv4.kernels.gemm.quantize import QuantizeRows


class Products(NamedTuple):
    """Weights with what becomes of them, and what their epilogues read and write."""

    fp8: tuple  # weight, scale and output of each
    plain: tuple  # weight and output of each
    heads: tuple


class MergedLinear:
    """Kernels of one configuration, and one that quantises activations for those that stream them.

    A subclass launches one: `_launch(i, codes, code_scales, x, products, stream, num_sms)`.

    Args:
        linears: by tiling.
    """

    def __init__(self, config: MergedLinearConfig, linears: Sequence[Any]):
        self.config = config
        self.linears = linears
        self.quantizer = QuantizeRows(config.in_features)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, K] bf16
        weight_0: cute.Tensor,  # [M0, K] e4m3
        scale_0: cute.Tensor,  # [ceil(M0 / 128), K / 128] E8M0 or fp32
        out_0: cute.Tensor,  # [T, M0] bf16, fp32 or e4m3, written
        stream,
        *,
        weight_1: cute.Tensor,
        scale_1: cute.Tensor,
        out_1: cute.Tensor,
        plain_0: cute.Tensor,  # [P0, K] bf16
        plain_out_0: cute.Tensor,  # [T, P0] bf16 or fp32, written
        plain_1: cute.Tensor,
        plain_out_1: cute.Tensor,
        plain_2: cute.Tensor,
        plain_out_2: cute.Tensor,
        plain_3: cute.Tensor,
        plain_out_3: cute.Tensor,
        plain_4: cute.Tensor,
        plain_out_4: cute.Tensor,
        x_codes: cute.Tensor,  # [T, K] e4m3, where the configuration has them
        x_scale: cute.Tensor,  # [T, K / 128] E8M0, the same
        codes: cute.Tensor,  # [T, K] e4m3 scratch of activations that are streamed, or [0, K]
        code_scales: cute.Tensor,  # [T, K / 128] E8M0, the same
        rope: cute.Tensor,  # [R, 64] fp32 of epilogues, or [0, 64]
        positions: cute.Tensor,  # [T] int32, or [0]
        squares_0: cute.Tensor,  # [T, H0, N0] fp32, written, or [0, H0, N0]
        squares_1: cute.Tensor,
        head_scales_0: cute.Tensor,  # [T, H0] fp32, written where out_0 are codes, or [0, H0]
        head_scales_1: cute.Tensor,
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernel, after the quantisation where it streams activations."""
        fp8 = ((weight_0, scale_0, out_0), (weight_1, scale_1, out_1))[: len(self.config.fp8)]
        plain = (
            (plain_0, plain_out_0), (plain_1, plain_out_1), (plain_2, plain_out_2),
            (plain_3, plain_out_3), (plain_4, plain_out_4),
        )[: len(self.config.plain)]  # fmt: skip
        squares, head_scales = (squares_0, squares_1), (head_scales_0, head_scales_1)
        heads = head_operands(self.config.head_epilogues, rope, positions, squares, head_scales)
        products = Products(fp8, plain, heads)
        # Without scratch, token tiles of a resident tiling follow each other.
        has_scratch = cutlass.min(codes.shape[0], code_scales.shape[0]) >= x.shape[0]
        for i in cutlass.range_constexpr(len(self.linears)):
            if cutlass.const_expr(self.config.has_codes):
                if tiling == i:
                    self._launch(i, x_codes, x_scale, x, products, stream, num_sms)
            elif cutlass.const_expr(not self.linears[i].plan.tiling.is_streamed):
                is_fallback = Boolean(False)
                if cutlass.const_expr(i == 0):
                    is_fallback = (tiling >= self.num_resident) & (has_scratch ^ True)
                if (tiling == i) | is_fallback:
                    self._launch(i, x, code_scales, x, products, stream, num_sms)
            elif (tiling == i) & has_scratch:
                self.quantizer.launch(x, codes, code_scales, stream, num_sms)
                self._launch(i, codes, code_scales, x, products, stream, num_sms)

    @property
    def num_resident(self) -> int:
        """Tilings that need no scratch."""
        return sum(not linear.plan.tiling.is_streamed for linear in self.linears)
