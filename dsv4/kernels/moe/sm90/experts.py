"""Experts of a layer for Hopper (sm_90a): FP4 or FP8 weights, FP8 activations, one arithmetic for
any number of tokens.

`ExpertsSm90` is what callers construct, compile and call: launches of which each begins while the
one before ends. Gate and up of all experts with SwiGLU, down of all experts, sum over a token's
experts; the shared expert rides in the first two.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint8, cute

from dsv4.kernels.gemm.quantize import QuantizeRows
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.moe.args import ARGS, values
from dsv4.kernels.moe.combine import Combine
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.plan import ProductPlan, Source, tilings
from dsv4.kernels.moe.sm90.context import Operands
from dsv4.kernels.moe.sm90.epilogue import Rows, SwiGlu
from dsv4.kernels.moe.sm90.load_warp import down, gate_and_up
from dsv4.kernels.moe.sm90.product import GroupedProduct


class ExpertsSm90:
    """Kernels of one configuration, in the order of `plan.tilings`."""

    # As in `ProductPlan`.
    lanes_per_warp = 1

    def __init__(self, config: ExpertsConfig):
        self.config = config
        self.products = []
        for tiling in tilings(config):
            first = ProductPlan.gate_and_up(config, tiling, self.lanes_per_warp)
            second = ProductPlan.down(config, tiling, self.lanes_per_warp)
            self.products.append((
                GroupedProduct(
                    first, gate_and_up, SwiGlu(config.top_k, config.limit), config.top_k
                ),
                GroupedProduct(second, down, Rows(config.top_k), config.top_k),
            ))  # fmt: skip
        self.quantizer = QuantizeRows(config.inner)
        self.combine = Combine(config.hidden, config.top_k)

    @cute.jit
    def __call__(
        self,
        x_codes: cute.Tensor,  # [T, D] e4m3
        x_scale: cute.Tensor,  # [T, D / 128] E8M0
        w1: cute.Tensor,  # prepared, as everything up to shared_s2
        s1: cute.Tensor,
        w3: cute.Tensor,
        s3: cute.Tensor,
        w2: cute.Tensor,
        s2: cute.Tensor,
        shared_w1: cute.Tensor,
        shared_s1: cute.Tensor,
        shared_w3: cute.Tensor,
        shared_s3: cute.Tensor,
        shared_w2: cute.Tensor,
        shared_s2: cute.Tensor,
        groups: cute.Tensor,  # [G, 4]
        counts: cute.Tensor,  # [2]
        pairs: cute.Tensor,  # [P]
        ids: cute.Tensor,  # [T, k]
        weights: cute.Tensor,  # [T, k] fp32
        h: cute.Tensor,  # [P + T, I] bf16, scratch
        h_codes: cute.Tensor,  # [P + T, I] e4m3, scratch
        h_scale: cute.Tensor,  # [P + T, I / 128] E8M0, scratch
        rows: cute.Tensor,  # [T, k + 1, D] bf16, scratch
        y: cute.Tensor,  # [T, D], written
        stream,
        *,
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernels."""
        flat = cute.make_tensor(
            rows.iterator,
            cute.make_layout(
                (rows.shape[0] * rows.shape[1], rows.shape[2]), stride=(rows.shape[2], 1)
            ),
        )
        first = Operands(
            x_codes, as_bytes(x_scale), w1, as_bytes(s1), w3, as_bytes(s3),
            shared_w1, as_bytes(shared_s1), shared_w3, as_bytes(shared_s3),
            groups, counts, pairs, weights, h,
        )  # fmt: skip
        for i in cutlass.range_constexpr(len(self.products)):
            if tiling == i:
                gate_and_up_product, down_product = self.products[i]
                gate_and_up_product.launch(first, stream, num_sms)
                source = h
                if cutlass.const_expr(down_product.plan.source is Source.CODES):
                    self.quantizer.launch(h, h_codes, h_scale, stream, num_sms)
                    source = h_codes
                second = Operands(
                    source, as_bytes(h_scale), w2, as_bytes(s2), w2, as_bytes(s2),
                    shared_w2, as_bytes(shared_s2), shared_w2, as_bytes(shared_s2),
                    groups, counts, pairs, weights, flat,
                )  # fmt: skip
                down_product.launch(second, stream, num_sms)
        self.combine.launch(rows, ids, counts, y, stream)


def as_bytes(scale: cute.Tensor) -> cute.Tensor:
    """E8M0 scales as bytes; fp32 ones as they are."""
    if scale.element_type is cutlass.Float32:
        return scale
    return cute.make_tensor(cute.recast_ptr(scale.iterator, dtype=Uint8), scale.layout)


def build(config: ExpertsConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(ExpertsSm90(config), ARGS, values(config), options)
