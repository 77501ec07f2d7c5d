"""Attention over codes for Hopper (sm_90a): INT8 or FP8 scores, FP8 weights and values.

    load warp             queries; tiles of keys and values -> rings (TMA)
    consumer warpgroups   queries, coded; scores, weights, sums: 64 queries each

A CTA computes 64 queries of a head for each consumer warpgroup at a time.
`print(AttentionPlan(128))` shows the budgets and the barrier graph; docs/design/lowp.md what the
numbers mean.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.lowp.args import ATTENTION_ARGS, values
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.load_warp import (
    LoadWarp,
    make_key_map,
    make_query_map,
    make_value_map,
)
from dsv4.kernels.lowp.plan import AttentionPlan
from dsv4.kernels.lowp.sm90.consumers import Consumers
from dsv4.kernels.lowp.sm90.context import AttentionContext, allocate
from dsv4.kernels.lowp.work import Operands, WorkTiles


class AttentionSm90:
    """Kernel of one configuration."""

    # Lanes that arrive for their warp at an mbarrier; a checker that follows every thread by
    # itself needs all 32.
    lanes_per_warp = 1

    def __init__(self, config: QuantizedAttentionConfig):
        self.config = config
        self.plan = AttentionPlan.of(config, self.lanes_per_warp)
        self.tiles = WorkTiles(config, self.plan.groups, self.plan.group_queries)
        # ==== roles ====
        self.loader = LoadWarp(self.plan)
        self.consumers = Consumers(config, self.plan)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [b, Hq, L, d] bf16 or fp16
        k_codes: cute.Tensor,  # [b, Hk, S, dp] int8 or e4m3
        k_scale: cute.Tensor,  # [b, Hk, tiles, scales] fp32
        v_codes: cute.Tensor,  # [b, Hk, tiles, dp, 128] e4m3
        out: cute.Tensor,  # [b, Hq, L, d], written
        stream,
        *,
        v_scale: cute.Tensor,  # [N, Hk, dp] fp32
        v_block_scale: cute.Tensor,
        km: cute.Tensor,  # [N, Hk, d], or [0, ..]: nothing was taken off
        vm: cute.Tensor,  # [N, Hk, d] fp32
        k_smooth: cute.Tensor,
        attn_mask: cute.Tensor,  # [b, Hq, L, S] uint8 or fp32, or [0, ..]
        cu_seqlens_q: cute.Tensor,  # [N + 1] int32 of packed sequences
        cu_seqlens_k: cute.Tensor,
        lse: cute.Tensor,  # [b, Hq, L] fp32, written, or [0, ..]: not wanted
        factor: Int32,
        section: Int32,
        num_ctas: Int32,
    ):
        """Launch the attention."""
        maps = (
            make_query_map(self.plan, q),
            make_key_map(self.plan, k_codes),
            make_value_map(v_codes),
        )
        operands = Operands(
            q, k_codes, k_scale, out, v_scale, km, vm, cu_seqlens_q, cu_seqlens_k, lse, factor,
            section, attn_mask,
        )  # fmt: skip
        self.kernel(maps, operands).launch(
            grid=[num_ctas, 1, 1],
            block=[self.plan.warps.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],  # queries
            cutlass.GridConstant[TensorMap],  # keys
            cutlass.GridConstant[TensorMap],  # values
        ],
        operands: Operands,
    ):
        """Initialise, then send every warp to its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, pipes = allocate(plan)
        ctx = AttentionContext(operands, self.tiles, smem, pipes)
        if warp == 0:
            with cute.arch.elect_one():
                mbarrier.init(plan.barriers, vars(pipes))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pdl.launch_dependents()
        if warp >= plan.warps["load"].first:
            cute.arch.setmaxregister_decrease(plan.registers["load"])
            if warp == plan.warps["load"].first:
                pdl.wait_for_previous_launch()
                self.loader.load(ctx, *maps)
        else:
            cute.arch.setmaxregister_increase(plan.registers["consumers"])
            pdl.wait_for_previous_launch()
            self.consumers.compute(ctx, warp)


def build(config: QuantizedAttentionConfig, options: str = ""):
    """Compile the kernel of `config` for sm_90a; needs no GPU."""
    return compile_kernel(AttentionSm90(config), ATTENTION_ARGS, values(config), options)
