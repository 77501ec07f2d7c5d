"""Experts of a layer for Hopper (sm_90a) that are multiplied in bf16: NVFP4 or bf16 weights,
activations as they are, beside a shared expert in FP8 or bf16.

The launches are those of `ExpertsSm90`, a tiling's two products in one launch or two; the shared
expert's first one beside the selection, or, of few tokens in FP8, beside the whole router. NVFP4 is
W4A16: weights are decoded to bf16 on their way into registers, and nothing rounds x or h but bf16
itself.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
from cutlass import Boolean, Int32, cute

from dsv4.kernels.moe.combine import Combine
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.expert_tensors import ExpertTensors, Selection
from dsv4.kernels.moe.gate_many import Gates
from dsv4.kernels.moe.plan import ProductPlan, Source, Tiling, tilings
from dsv4.kernels.moe.routing import TOKEN_TILE, RoutingConfig
from dsv4.kernels.moe.select import Select
from dsv4.kernels.moe.sm90.bf16_roles import Bf16Activations, Bf16Consumers
from dsv4.kernels.moe.sm90.epilogue import Rows, SwiGlu
from dsv4.kernels.moe.sm90.experts import (
    ExpertsSm90,
    down_operands,
    router_tensors,
    up_operands,
)
from dsv4.kernels.moe.sm90.joint_products import JointProducts
from dsv4.kernels.moe.sm90.product import GroupedProduct, ProductBesideSelection
from dsv4.kernels.moe.sm90.router_beside_product import RouterBesideProduct


class Bf16Product(GroupedProduct):
    """One of the two products of all experts, in bf16 but for a shared expert in FP8."""

    activation_warps = Bf16Activations
    consumer_warps = Bf16Consumers


class Bf16Experts:
    """Kernels of one configuration, in the order of `plan.tilings`.

    Args:
        routing: of the router that leads.
    """

    # As in `ProductPlan`.
    lanes_per_warp = 1
    # Of `products`, which both have.
    _select = ExpertsSm90._select

    def __init__(self, config: ExpertsConfig, routing: RoutingConfig):
        self.gate = Gates(routing)
        self.config = config
        self.has_bf16_shared = config.shared_dtype == "bfloat16"
        self.router = None if self.has_bf16_shared else self._router(config, routing)
        self.products = []
        for tiling in tilings(config):
            shared, routed = (self._gate_and_up(tiling, is_shared) for is_shared in (True, False))
            select = Select(routing, shared.plan.warps.threads // 32, takes_several=True)
            plan = ProductPlan.down(config, tiling, self.lanes_per_warp)
            down = Bf16Product(plan, Rows(plan.panels, config.top_k), config.top_k)
            joint = JointProducts(routed, down) if tiling.is_joint else None
            beside = ProductBesideSelection(shared, select)
            self.products.append((beside, routed, down, joint))
        self.combine = Combine(config.hidden, config.top_k)

    def _gate_and_up(
        self, tiling: Tiling, is_shared: bool, source: Source = Source.TOKENS
    ) -> Bf16Product:
        config = self.config
        plan = ProductPlan.gate_and_up(config, tiling, is_shared, self.lanes_per_warp, source)
        epilogue = SwiGlu(plan.panels, config.top_k, config.limit)
        return Bf16Product(plan, epilogue, config.top_k)

    def _router(self, config: ExpertsConfig, routing: RoutingConfig) -> RouterBesideProduct:
        """The router of few tokens, beside the first product of a shared expert in FP8, which
        alone reads codes."""
        tiling = replace(tilings(config)[0], alone_tokens=TOKEN_TILE)
        product = self._gate_and_up(tiling, True, Source.BFLOAT16_TOKENS)
        return RouterBesideProduct(product, routing)

    def leads(self, tokens: Int32, tiling: Int32, x_codes: cute.Tensor, num_sms: Int32) -> Boolean:
        """Whether the whole router shares a launch with the shared expert's first product; codes
        that are given are not read."""
        return Boolean(False) if self.router is None else self.router.serves(tokens, num_sms)

    @cute.jit
    def launch(
        self,
        tensors: ExpertTensors,
        live_tokens: cute.Tensor,  # [1] int32, or no rows
        selection: Selection,
        stream,
        tiling: Int32,
        num_sms: Int32,
    ):
        """Launch one tiling's kernels up to the rows, the router's among them."""
        codes = up_operands(tensors, live_tokens)
        if not selection.leads:
            self.gate.launch(selection.gate, stream, selection.token_tiles)
        if cutlass.const_expr(self.router is not None):  # noqa: SIM102 static, dynamic
            if selection.leads:
                self.router.launch(
                    codes._replace(x=tensors.x), router_tensors(selection), stream, num_sms,
                    selection.group_tokens,
                )  # fmt: skip
        scales = None
        if cutlass.const_expr(self.config.expert_dtype == "nvfp4"):
            scales = tensors.global_scales
        up = codes._replace(x=tensors.x, global_scales=scales)
        down = down_operands(tensors, False, live_tokens)._replace(global_scales=scales)
        shared_up = codes
        if cutlass.const_expr(self.has_bf16_shared):
            shared_up = codes._replace(x=tensors.x)
        for i in cutlass.range_constexpr(len(self.products)):
            if tiling == i:
                _, routed, second, joint = self.products[i]
                self._select(i, shared_up, selection, stream, num_sms)
                if cutlass.const_expr(joint is not None):
                    joint.launch(up, down, tensors.taken, stream, num_sms)
                else:
                    routed.launch(up, stream, num_sms)
                    second.launch(down, stream, num_sms)
