"""Experts of a layer for Hopper (sm_90a): FP4 or FP8 weights, FP8 activations, one arithmetic for
any number of tokens.

`ExpertsSm90` is what callers construct, compile and call: launches of which each begins while the
one before ends. Gate and up with SwiGLU of the shared expert; the same of the routed ones, and down
of all, in one launch or two; sum over a token's experts. The first needs no routing: where a router
leads, its selection shares that launch, or all of it does.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, cute

from dsv4.kernels.gemm.quantize import QuantizeRows, as_bytes
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.moe.args import ARGS, values
from dsv4.kernels.moe.combine import Combine
from dsv4.kernels.moe.config import K_BLOCK, ExpertsConfig
from dsv4.kernels.moe.expert_tensors import ExpertTensors, Selection
from dsv4.kernels.moe.gate_many import Gates
from dsv4.kernels.moe.gather import Gathered, GatherTokens, QuantizeOrdered
from dsv4.kernels.moe.plan import ProductPlan, Source, Tiling, tilings
from dsv4.kernels.moe.routing import (
    MOST_ROUTED,
    MOST_RUNS,
    ROUTER_TOKENS,
    TOKEN_TILE,
    RoutingConfig,
)
from dsv4.kernels.moe.select import Select
from dsv4.kernels.moe.select_many import SelectMany
from dsv4.kernels.moe.sm90.context import Operands
from dsv4.kernels.moe.sm90.epilogue import RoundedSwiGlu, Rows, SwiGlu
from dsv4.kernels.moe.sm90.joint_products import JointProducts
from dsv4.kernels.moe.sm90.product import GroupedProduct, ProductBesideSelection
from dsv4.kernels.moe.sm90.router_beside_product import RouterBesideProduct, RouterTensors
from dsv4.kernels.moe.sm90.router_within_product import RouterWithinProduct
from dsv4.kernels.moe.sm90.wide_context import Activations
from dsv4.kernels.moe.sm90.wide_epilogue import WideRows, WideSwiGlu
from dsv4.kernels.moe.sm90.wide_product import WideProduct
from dsv4.kernels.moe.wide_plan import SCALE_BYTES, SCALE_COPIES, WidePlan, scale_columns


class ExpertsSm90:
    """Kernels of one configuration, in the order of `plan.tilings`.

    Args:
        routing: of the router that leads; None where the lists are given.
    """

    # As in `ProductPlan`.
    lanes_per_warp = 1

    def __init__(self, config: ExpertsConfig, routing: RoutingConfig | None = None):
        self.config = config
        self.products = []
        self.wide = []  # of many tokens, behind the others
        self.leading, self.rounding = [], None
        self.within = {}  # routers by the tiling of the product that they share a launch with
        if routing is not None:
            self.leading, self.rounding = self._routers(config, routing)
        self.gate = None if routing is None else Gates(routing)
        for tiling in tilings(config):
            if tiling.is_wide:
                self.wide.append(WideProducts(config, tiling, routing, self.lanes_per_warp))
                continue
            shared, routed = (self._gate_and_up(tiling, is_shared) for is_shared in (True, False))
            if routing is not None:
                if tiling.alone_tokens > ROUTER_TOKENS:
                    self.within[len(self.products)] = RouterWithinProduct(shared, routing)
                select = Select(routing, shared.plan.warps.threads // 32, takes_several=True)
                shared = ProductBesideSelection(shared, select)
            plan = ProductPlan.down(config, tiling, self.lanes_per_warp)
            second = GroupedProduct(plan, Rows(plan.panels, config.top_k), config.top_k)
            joint = JointProducts(routed, second) if tiling.is_joint else None
            self.products.append((shared, routed, second, joint))
        self.quantizer = QuantizeRows(config.inner)
        self.combine = Combine(config.hidden, config.top_k)

    def _routers(self, config: ExpertsConfig, routing: RoutingConfig) -> tuple:
        """Routers of few tokens, by the columns of the product beside them, ascending; and the one
        of a tile of tokens without codes."""
        few = tilings(config)[0]
        columns = range(TOKEN_TILE, ROUTER_TOKENS + 1, TOKEN_TILE)
        tilings_of = [replace(few, alone_tokens=count) for count in columns]
        products = [self._gate_and_up(tiling, True) for tiling in tilings_of]
        rounding = self._gate_and_up(tilings_of[0], True, Source.BFLOAT16_TOKENS)
        return (
            [RouterBesideProduct(product, routing) for product in products],
            RouterBesideProduct(rounding, routing, writes_codes=True),
        )

    def _gate_and_up(
        self, tiling: Tiling, is_shared: bool, source: Source = Source.TOKENS
    ) -> GroupedProduct:
        config = self.config
        plan = ProductPlan.gate_and_up(config, tiling, is_shared, self.lanes_per_warp, source)
        epilogue_type = RoundedSwiGlu if plan.rounds else SwiGlu
        epilogue = epilogue_type(plan.panels, config.top_k, config.limit)
        return GroupedProduct(plan, epilogue, config.top_k)

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
        taken: cute.Tensor,  # [1]
        pairs: cute.Tensor,  # [P]
        ids: cute.Tensor,  # [T, k]
        weights: cute.Tensor,  # [T, k] fp32
        h: cute.Tensor,  # [P + T, I] bf16, scratch
        h_codes: cute.Tensor,  # [P + T, I] e4m3, scratch
        h_scale: cute.Tensor,  # [2 I / 128, Q > P + T] fp32, scratch; or E8M0 by row
        rows: cute.Tensor,  # [T, k + 1, D] bf16, scratch
        y: cute.Tensor,  # [T, D], written
        stream,
        *,
        tiling: Int32,  # index
        num_sms: Int32,
    ):
        """Launch one tiling's kernels."""
        tensors = ExpertTensors(
            x_codes, x_scale, w1, s1, w3, s3, w2, s2, shared_w1, shared_s1, shared_w3, shared_s3,
            shared_w2, shared_s2, groups, counts, taken, pairs, ids, weights, h, h_codes, h_scale,
            rows,
        )  # fmt: skip
        live_tokens = cute.make_tensor(counts.iterator + 1, cute.make_layout((1,)))
        self.launch(tensors, live_tokens, None, stream, tiling, num_sms)
        self.combine.launch(rows, ids, counts, y, stream)

    @cute.jit
    def launch(
        self,
        tensors: ExpertTensors,
        live_tokens: cute.Tensor,  # [1] int32, or no rows
        selection: Selection | None,
        stream,
        tiling: Int32,
        num_sms: Int32,
    ):
        """Launch one tiling's kernels up to the rows, the router's among them."""
        up = up_operands(tensors, live_tokens)
        if cutlass.const_expr(selection is not None):
            self._lead(up, selection, stream, tiling, num_sms)
        for i in cutlass.range_constexpr(len(self.wide)):
            if tiling == len(self.products) + i:
                self.wide[i].launch(tensors, live_tokens, selection, stream, num_sms)
        for i in cutlass.range_constexpr(len(self.products)):
            if tiling == i:
                shared, routed, second, joint = self.products[i]
                if cutlass.const_expr(selection is None):
                    shared.launch(up, stream, num_sms)
                else:
                    self._select(i, up, selection, stream, num_sms)
                first, down = up, down_operands(tensors, routed.plan.rounds, live_tokens)
                if cutlass.const_expr(routed.plan.rounds):
                    first = up._replace(y=tensors.h_codes, y_scale=tensors.h_scale_bytes)
                    own = (
                        rows_from(rows, tensors.pairs.shape[0])
                        for rows in (tensors.h, tensors.h_codes, tensors.h_scale_bytes)
                    )
                    self.quantizer.launch(*own, stream, num_sms)
                if cutlass.const_expr(joint is not None):
                    joint.launch(first, down, tensors.taken, stream, num_sms)
                else:
                    routed.launch(first, stream, num_sms)
                    second.launch(down, stream, num_sms)

    @cute.jit
    def _select(
        self, i: cutlass.Constexpr, up: Operands, selection: Selection, stream, num_sms: Int32
    ):
        """Launch the selection beside the shared expert's first product, unless the whole router is
        there."""
        if not selection.leads:
            lists, group_tokens = selection.lists, selection.group_tokens
            self.products[i][0].launch(up, lists, stream, num_sms, group_tokens)

    def leads(self, tokens: Int32, tiling: Int32, x_codes: cute.Tensor, num_sms: Int32) -> Boolean:
        """Whether the whole router shares a launch with the shared expert's first product."""
        if not self.leading:
            return Boolean(False)
        with_codes = Boolean(False)
        for index in self.within:
            with_codes = with_codes | (tiling == index)
        with_codes = with_codes & (tokens > ROUTER_TOKENS) & (tokens <= MOST_ROUTED)
        for router in self.leading:
            with_codes = with_codes | router.serves(tokens, num_sms)
        without = self.rounding.serves(tokens, num_sms)
        return cutlass.select_(x_codes.shape[0] > 0, with_codes, without)

    @cute.jit
    def _lead(self, up: Operands, selection: Selection, stream, tiling: Int32, num_sms: Int32):
        """Launch the gate, or the whole router with the shared expert's first product."""
        gate = selection.gate
        if not selection.leads:
            self.gate.launch(gate, stream, selection.token_tiles)
        if cutlass.const_expr(len(self.leading) > 0):
            router, group_tokens = router_tensors(selection), selection.group_tokens
            tile = (Int32(gate.x.shape[0]) - 1) // TOKEN_TILE
            for i in cutlass.range_constexpr(len(self.leading)):
                if selection.has_codes & (tile == i):
                    self.leading[i].launch(up, router, stream, num_sms, group_tokens)
            for i, within in self.within.items():
                if selection.has_codes & (gate.x.shape[0] > ROUTER_TOKENS) & (tiling == i):
                    within.launch(up, router, stream, num_sms, group_tokens)
            if selection.leads and not selection.has_codes:
                tokens = up._replace(x=gate.x)
                self.rounding.launch(tokens, router, stream, num_sms, group_tokens)


class WideProducts:
    """Launches of many tokens: selection, where a router leads; tokens in the order of tiles; gate
    and up of all experts; h rounded; down of all.

    Args:
        routing: as of `ExpertsSm90`.
    """

    def __init__(self, config: ExpertsConfig, tiling: Tiling, routing, lanes_per_warp: int):
        self.select = None if routing is None else SelectMany(routing)
        plan = WidePlan.up(config, tiling, lanes_per_warp)
        is_folded = plan.routed[0].is_folded
        self.gather = GatherTokens(config.hidden, config.top_k, is_folded)
        self.up = WideProduct(plan, WideSwiGlu(plan.panels, config.top_k, config.limit))
        self.quantizer = QuantizeOrdered(config.inner, config.top_k, is_folded)
        plan = WidePlan.down(config, tiling, lanes_per_warp)
        self.down = WideProduct(plan, WideRows(plan, config.top_k))

    @cute.jit
    def launch(
        self, tensors: ExpertTensors, live_tokens: cute.Tensor, selection: Selection | None, stream,
        num_sms: Int32,
    ):  # fmt: skip
        """Launch everything up to the rows."""
        if cutlass.const_expr(selection is not None):
            # Runs have an SM each.
            most_runs = cutlass.min(num_sms, MOST_RUNS)
            self.select.launch(selection.lists, stream, selection.group_tokens, most_runs)
        gathered = gathered_of(tensors)
        self.gather.launch(
            tensors.x_codes, as_bytes(tensors.x_scale), tensors.groups, tensors.counts,
            tensors.pairs, tensors.weights, gathered, stream, num_sms,
        )  # fmt: skip
        x = Activations(gathered.codes, tensors.x_codes, gathered.scales, Int32(0))
        self.up.launch(up_operands(tensors, live_tokens), x, gathered.factors, stream, num_sms)
        scales = tensors.h_scale
        self.quantizer.launch(tensors.h, tensors.h_codes, scales, stream, num_sms)
        h = Activations(tensors.h_codes, tensors.h_codes, scales, Int32(tensors.pairs.shape[0]))
        down = down_operands(tensors, True, live_tokens)
        self.down.launch(down, h, gathered.factors, stream, num_sms)


def router_tensors(selection: Selection) -> RouterTensors:
    """Tensors of a router that is one launch with a product."""
    gate = selection.gate
    return RouterTensors(
        gate.x, gate.weight, selection.counter, selection.lists, gate.codes, gate.scales
    )


def up_operands(tensors: ExpertTensors, live_tokens: cute.Tensor) -> Operands:
    """Operands of gate and up."""
    return Operands(
        tensors.x_codes, as_bytes(tensors.x_scale), tensors.w1, as_bytes(tensors.s1), tensors.w3,
        as_bytes(tensors.s3), tensors.shared_w1, as_bytes(tensors.shared_s1), tensors.shared_w3,
        as_bytes(tensors.shared_s3), live_tokens, tensors.groups, tensors.counts, tensors.pairs,
        tensors.weights, tensors.h,
    )  # fmt: skip


def down_operands(tensors: ExpertTensors, has_codes: bool, live_tokens: cute.Tensor) -> Operands:
    """Operands of down, from codes of h or from h."""
    tokens, places, hidden = tensors.rows.shape
    layout = cute.make_layout((tokens * places, hidden), stride=(hidden, 1))
    return Operands(
        tensors.h_codes if has_codes else tensors.h, tensors.h_scale_bytes,
        *(tensors.w2, as_bytes(tensors.s2)) * 2,
        *(tensors.shared_w2, as_bytes(tensors.shared_s2)) * 2,
        live_tokens, tensors.groups, tensors.counts, tensors.pairs, tensors.weights,
        cute.make_tensor(tensors.rows.iterator, layout),
    )  # fmt: skip


def rows_from(rows: cute.Tensor, first: Int32) -> cute.Tensor:
    """Rows from one on."""
    start = rows.iterator + Int64(first) * rows.stride[0]
    shape = (rows.shape[0] - first, rows.shape[1])
    return cute.make_tensor(start, cute.make_layout(shape, stride=rows.stride))


def gathered_of(tensors: ExpertTensors) -> Gathered:
    """Where `rows` will be, tokens in the order of tiles until all of h is there."""
    pairs, (tokens, hidden) = tensors.pairs.shape[0], tensors.x_codes.shape
    blocks, columns = hidden // K_BLOCK * SCALE_COPIES, scale_columns(pairs + tokens)
    start = tensors.rows.iterator.toint()

    def at(offset, dtype) -> cute.Pointer:
        return cute.make_ptr(dtype, start + offset, cute.AddressSpace.gmem, assumed_align=16)

    scales = Int64(pairs) * hidden
    factors = scales + Int64(columns) * (SCALE_BYTES * blocks)
    codes = cute.make_layout((pairs, hidden), stride=(hidden, 1))
    return Gathered(
        cute.make_tensor(at(0, Float8E4M3FN), codes),
        cute.make_tensor(
            at(scales, Float32), cute.make_layout((blocks, columns), stride=(columns, 1))
        ),
        cute.make_tensor(at(factors, Float32), cute.make_layout((pairs,))),
    )


def build(config: ExpertsConfig, options: str = ""):
    """Compile the kernels of `config` for sm_90a; needs no GPU."""
    return compile_kernel(ExpertsSm90(config), ARGS, values(config), options)
