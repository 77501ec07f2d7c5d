"""Attention over codes for Hopper (sm_90a): INT8 or FP8 scores, FP8 weights and values.

    load warp             queries; tiles of keys and values -> rings (TMA)
    consumer warpgroups   queries, coded; scores, weights, sums: 64 queries each

A CTA computes 64 queries of a head for each consumer warpgroup at a time.
`print(AttentionPlan(128))` shows the budgets and the barrier graph; docs/design/lowp.md what the
numbers mean.
"""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.experimental.cuda.tensor_map import TensorMap

from dsv4.kernels.kit import mbarrier, pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.lowp.args import ATTENTION_ARGS, values
from dsv4.kernels.lowp.attention import Attention
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import AttentionPlan
from dsv4.kernels.lowp.sm90.consumers import Consumers
from dsv4.kernels.lowp.sm90.context import AttentionContext, allocate
from dsv4.kernels.lowp.work import Operands


class AttentionSm90(Attention):
    """Kernel of one configuration."""

    def __init__(self, config: QuantizedAttentionConfig):
        super().__init__(config, AttentionPlan.of(config, self.lanes_per_warp))
        self.consumers = Consumers(config, self.plan)

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
