"""Experts of a layer for Blackwell (sm_100a): FP4 or FP8 weights and FP8 activations, or both in
NVFP4, one arithmetic for any number of tokens.

`ExpertsSm100` is what callers construct, compile and call: launches of which each begins while the
one before ends. Gate and up of all experts, with SwiGLU and codes of h; down of all; sum over a
token's experts. Where a router leads, its selection comes first.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from dsv4.kernels.gemm.quantize import as_bytes
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.moe.args import ARGS, values
from dsv4.kernels.moe.combine import Combine
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.expert_tensors import ExpertTensors, Selection
from dsv4.kernels.moe.gate_many import Gates
from dsv4.kernels.moe.packed_rows import PackedRows
from dsv4.kernels.moe.routing import RoutingConfig
from dsv4.kernels.moe.select import Select
from dsv4.kernels.moe.sm100.context import Operands, PackedOperands
from dsv4.kernels.moe.sm100.epilogue import Rows, SwiGlu
from dsv4.kernels.moe.sm100.packed_epilogue import PackedDown, PackedSwiGlu
from dsv4.kernels.moe.sm100.plan import ProductPlan, tilings
from dsv4.kernels.moe.sm100.product import GroupedProduct


class ExpertsSm100:
    """Kernels of one configuration, in the order of `plan.tilings`.

    Args:
        routing: of the router that leads; None where the lists are given.
    """

    def __init__(self, config: ExpertsConfig, routing: RoutingConfig | None = None):
        self.config = config
        self.products = []
        for tiling in tilings(config):
            up = ProductPlan.gate_and_up(config, tiling)
            down = ProductPlan.down(config, tiling)
            first, second = (PackedSwiGlu, PackedDown) if up.is_packed else (SwiGlu, Rows)
            self.products.append((
                GroupedProduct(up, first(up, config.top_k, config.limit), config.top_k),
                GroupedProduct(down, second(down, config.top_k), config.top_k),
            ))  # fmt: skip
        self.gate = None if routing is None else Gates(routing)
        self.select = None if routing is None else Select(routing)
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
        taken: cute.Tensor,  # not looked at
        pairs: cute.Tensor,  # [P]
        ids: cute.Tensor,  # [T, k]
        weights: cute.Tensor,  # [T, k] fp32
        h: cute.Tensor,  # not looked at
        h_codes: cute.Tensor,  # [P + T, I] e4m3, scratch
        h_scale: cute.Tensor,  # fp32 that holds [P + T, I / 128] E8M0, scratch
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
        self.launch(tensors, None, None, stream, tiling, num_sms)
        self.combine.launch(rows, ids, counts, y, stream)

    def leads(self, tokens: Int32, tiling: Int32, x_codes: cute.Tensor, num_sms: Int32) -> Boolean:
        """Whether the whole router shares a launch with a product: never."""
        return Boolean(False)

    @cute.jit
    def launch(
        self,
        tensors: ExpertTensors,
        live_tokens,  # not looked at: the lists say how many there are
        selection: Selection | None,
        stream,
        tiling: Int32,
        num_sms: Int32,
    ):
        """Launch one tiling's kernels up to the rows, the selection among them."""
        if cutlass.const_expr(selection is not None):
            self.gate.launch(selection.gate, stream, selection.token_tiles)
            self.select.launch(selection.lists, stream, selection.group_tokens)
        up, down = up_operands(tensors), down_operands(tensors)
        for i in cutlass.range_constexpr(len(self.products)):
            if tiling == i:
                first, second = self.products[i]
                first.launch(up, stream, num_sms)
                second.launch(down, stream, num_sms)


def up_operands(t: ExpertTensors) -> Operands:
    """Operands of gate and up."""
    return Operands(
        t.x_codes, as_bytes(t.x_scale), (t.w1, t.w3), (as_bytes(t.s1), as_bytes(t.s3)),
        (t.shared_w1, t.shared_w3), (as_bytes(t.shared_s1), as_bytes(t.shared_s3)),
        t.groups, t.counts, t.pairs, t.weights, t.h_codes, t.h_scale_bytes,
        packed_operands(t, None if t.packed is None else t.packed.rows),
    )  # fmt: skip


def down_operands(t: ExpertTensors) -> Operands:
    """Operands of down."""
    tokens, places, hidden = t.rows.shape
    rows = cute.make_layout((tokens * places, hidden), stride=(hidden, 1))
    h_scale = t.h_scale_bytes
    return Operands(
        t.h_codes, h_scale, (t.w2, t.w2), (as_bytes(t.s2),) * 2, (t.shared_w2,) * 2,
        (as_bytes(t.shared_s2),) * 2, t.groups, t.counts, t.pairs, t.weights,
        cute.make_tensor(t.rows.iterator, rows), h_scale, packed_operands(t, t.packed_h),
    )  # fmt: skip


def packed_operands(t: ExpertTensors, x: PackedRows | None) -> PackedOperands | None:
    """Operands in NVFP4 of a product with x, where there are any."""
    if x is None:
        return None
    return PackedOperands(x, t.packed.whole, t.packed_h, t.global_scales)


def build(config: ExpertsConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(ExpertsSm100(config), ARGS, values(config), options)
